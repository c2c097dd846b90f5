"""Settings of ``craft run``: flag over ``CRAFT_*`` variable over ``craft.toml`` over default, with their origin."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from craft.decide.detect.hangs import NO_HANGS, HangLimits
from craft.decide.step.gradient_memory import Hold
from craft.decide.step.settle import LossAnswer
from craft.decide.techniques import (
    Alerts,
    Checkpoints,
    Hang,
    Loss,
    Preemption,
    PreemptionSettings,
    defaults,
    max_restarts_of,
    spares_of,
)
from craft.decide.techniques.technique import Chosen
from craft.protocol.errors import ConfigError
from craft.protocol.values.config import says
from craft.settings.alerts import write_alerts
from craft.settings.files.effective_file import undamaged, write_sealed
from craft.settings.files.toml_file import TomlFile, complaint, key_in, toml
from craft.settings.techniques import (
    NO_WISHES,
    OF_TECHNIQUES,
    Given,
    Refuse,
    TechniqueChoice,
    Wishes,
    choose,
    flat,
    given_by_flags,
    in_variables,
    of_environment,
    to_json,
    to_toml,
)
from craft.settings.worker import WorkerSettings, as_path

TeeMode = Literal["leader", "all", "none"]


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of ``craft run``."""

    script: str
    arguments: tuple[str, ...] = ()
    as_module: bool = False
    workers: Annotated[int, says("Workers of this host.")] = 1
    min_workers: Annotated[int, says("Give up when fewer are left and none can replace them.")] = 1
    workers_per_replica: Annotated[
        int,
        says("Workers that hold one copy of the model together; the job's workers are a multiple of it."),
    ] = 1
    lease_s: Annotated[
        float,
        msgspec.Meta(gt=0.0, le=1e9),
        says("A worker whose exchange broke ends when its agent could not reach the lighthouse for this long."),
    ] = 10.0
    resume: Annotated[
        str | None,
        says("Begin from a checkpoint: auto (the newest good one, a fresh start where there is none), or its step."),
    ] = None
    chaos: Annotated[
        bool, says("Whether this job is there for faults to be injected: craft chaos then does not ask.")
    ] = False
    threads: Annotated[
        int, says("OMP_NUM_THREADS of every worker: part of the job's identity, since bits depend on it.")
    ] = 1
    preload: Annotated[
        str,
        says("Modules, separated by commas, that are imported once, before workers are forked: not by each of them."),
    ] = ""
    tee: Annotated[
        TeeMode, says("Whose output is shown on the terminal: the leader's, that of all workers of this host, or none.")
    ] = "leader"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535), says("Port of the lighthouse; 0 picks a free one.")] = 0
    lighthouse: Annotated[str | None, says("URL of a running lighthouse; by default one is started.")] = None
    token_file: Annotated[
        Path | None, says("File with the token of that lighthouse, or for the one that is started.")
    ] = None
    tls_ca: Annotated[
        Path | None,
        says(
            "Certificates by which that of a lighthouse at https:// is verified; by default those this machine trusts."
        ),
    ] = None
    check_bits: Annotated[
        bool,
        says(
            "Compare the bits of one microbatch between all workers in the first step and in a later one, and of those who join"
            " with the others."
        ),
    ] = True
    check_script: Annotated[
        bool, says("Look at the script's loop in its first steps, and refuse what would give a wrong result unseen.")
    ] = True
    digest_bytes: Annotated[
        int,
        msgspec.Meta(ge=0),
        says(
            "How much of the state is compared between the workers in every step, at least a thousandth; 0 switches it off."
        ),
    ] = 32768
    bucket_mb: Annotated[float, msgspec.Meta(gt=0.0, le=1e6), says("Size limit of a gradient bucket, in MiB.")] = 25.0
    group: Annotated[
        Literal["auto", "gloo", "nccl"],
        says("What carries gradients between workers; auto: NCCL between GPUs, Gloo between CPUs."),
    ] = "auto"
    hold: Annotated[
        Hold,
        says(
            "Where gradients that were sent are held until their step is committed: on the device, in pinned memory of"
            " the host (where they are on a GPU), or nowhere: recompute all of the step after a loss."
        ),
    ] = "device"
    host: Annotated[str, says("Name of this host.")] = ""
    address: Annotated[str, says("Where workers on other hosts reach those of this one.")] = "127.0.0.1"
    techniques: Chosen = msgspec.field(default_factory=defaults)
    """The enabled techniques, with their settings."""

    @property
    def worker_prefix(self) -> str:
        """Prefix of worker ids, which are unique in the job; it names the host if hosts share a lighthouse."""
        return "w" if self.lighthouse is None else f"{self.host}-w"

    @property
    def spares(self) -> int:
        return spares_of(self.techniques.by_name)

    @property
    def max_restarts(self) -> int:
        return max_restarts_of(self.techniques.by_name)

    @property
    def on_loss(self) -> LossAnswer:
        loss = self.techniques.get(Loss)
        assert loss is not None
        return loss.settings.answer

    @property
    def hang_limits(self) -> HangLimits:
        hang = self.techniques.get(Hang)
        return hang.settings if hang is not None else NO_HANGS

    @property
    def checkpoints(self) -> str | None:
        found = self.techniques.get(Checkpoints)
        return found.settings.url if found is not None else None

    @property
    def handles_preemption(self) -> bool:
        """Whether the job takes a checkpoint before it ends by SIGTERM or a file."""
        return self.techniques.get(Preemption) is not None

    @property
    def _preemption(self) -> PreemptionSettings:
        found = self.techniques.get(Preemption)
        return found.settings if found is not None else PreemptionSettings()

    @property
    def preempt_file(self) -> Path | None:
        file = self._preemption.file
        return Path(file) if file is not None and self.handles_preemption else None

    @property
    def drain_limit_s(self) -> float:
        return self._preemption.limit_s

    @property
    def of_workers(self) -> dict[str, Any]:
        """The settings that every worker gets."""
        same = {name: getattr(self, name) for name in WorkerSettings.__struct_fields__ if name in OWN}
        return {**same, "techniques": to_json(self.techniques)}


_COMMAND = ("script", "arguments", "as_module")
"""Given on the command line only."""
OWN = tuple(name for name in RunSettings.__struct_fields__ if name not in _COMMAND and name != "techniques")


class Resolved(NamedTuple):
    settings: RunSettings
    origins: dict[str, str]
    """The origin of each setting of ``[run]``."""
    choice: TechniqueChoice


def resolve(flags: Mapping[str, Any], config: Path | None, wishes: Wishes = NO_WISHES) -> Resolved:
    """Return the effective settings and their origins."""
    document = TomlFile(config)
    values: dict[str, Any] = {"host": socket.gethostname(), "threads": _threads()}
    origins = dict.fromkeys(OWN, "default")
    given: dict[str, Given] = {}
    for origin, found in (
        (str(config), _of_file(document)),
        ("environment", in_variables((*OWN, *OF_TECHNIQUES))),
        ("flag", given_by_flags(flags)),
    ):
        given.update(found)
        values.update({name: each.value for name, each in found.items() if name not in OF_TECHNIQUES})
        origins.update(dict.fromkeys((name for name in found if name not in OF_TECHNIQUES), origin))

    def refused(key: str | None, message: str) -> ConfigError:
        return given[key].refused(document, message) if key in given else ConfigError(f"{key}: {message}")

    try:
        settings = msgspec.convert(values, RunSettings, strict=False, dec_hook=as_path)
    except msgspec.ValidationError as error:
        raise refused(key_in(error), complaint(error, RunSettings, values)) from None
    choice = choose(document, given, wishes)
    settings = msgspec.structs.replace(settings, techniques=choice.techniques)
    _check(settings, refused)
    return Resolved(settings, origins, choice)


def _check(settings: RunSettings, refused: Refuse) -> None:
    if settings.workers < 1:
        raise refused("workers", "a job needs at least 1 worker")
    if not 1 <= settings.min_workers <= settings.workers and settings.lighthouse is None:
        raise refused("min_workers", f"must be between 1 and --workers {settings.workers}")
    if settings.workers_per_replica < 1:
        raise refused("workers_per_replica", "a replica has at least 1 worker")
    if settings.lighthouse is None and (trouble := uneven(settings.workers, settings.workers_per_replica)) is not None:
        raise refused("workers_per_replica", trouble)
    if settings.resume is not None and settings.resume != "auto" and not settings.resume.isdigit():
        raise refused("resume", "give the number of a step, or auto")
    if not settings.host:
        raise refused("host", "a host needs a name")
    if (trouble := _not_here(settings.address)) is not None:
        raise refused("address", f"{settings.address!r} is not an address of this host ({trouble})")
    if settings.threads < 1:
        raise refused("threads", "a worker needs at least 1 thread")
    if settings.lighthouse is not None and settings.token_file is None:
        raise ConfigError("--lighthouse needs --token-file: the file with the token of that lighthouse")
    if settings.lighthouse is not None and settings.chaos:
        raise ConfigError("--chaos is for the lighthouse: give it to 'craft lighthouse', not to the hosts of its job")
    if settings.tls_ca is not None and not (settings.lighthouse or "").startswith("https://"):
        raise ConfigError("--tls-ca is for a lighthouse at https://: name one with --lighthouse")
    if not settings.as_module and not Path(settings.script).is_file():
        raise ConfigError(f"there is no script {settings.script}: give the path of a Python file (or a module with -m)")


def uneven(workers: int, workers_per_replica: int) -> str | None:
    """Return why the workers of a job cannot be whole replicas, and what to do; None if they can."""
    rest = workers % workers_per_replica
    if not rest:
        return None
    fewer = workers - rest
    either = f"{fewer} or " if fewer else ""
    return (
        f"{workers} workers are not whole replicas of {workers_per_replica}: give --workers"
        f" {either}{fewer + workers_per_replica}"
    )


def _not_here(address: str) -> str | None:
    """Return why workers cannot listen on an address; None if they can."""
    try:
        family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind(place)
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def for_lighthouse(flags: Mapping[str, Any], config: Path | None, wishes: Wishes, *, effective: bool) -> Chosen:
    """Return the techniques of a job for its lighthouse; ``effective``: the file holds the effective settings already."""
    document = TomlFile(undamaged(config) if effective and config is not None else config)
    given = {name: each for name, each in _of_file(document).items() if name in OF_TECHNIQUES}
    environment = {} if effective else of_environment()
    return choose(document, {**given, **environment, **given_by_flags(flags)}, wishes).techniques


def _of_file(document: TomlFile) -> dict[str, Given]:
    """Return the settings in ``[run]``."""
    found = document.table("run")
    document.check_keys("run", found, (*_COMMAND, *OWN, *sorted(OF_TECHNIQUES)), "[run] has no setting")
    origin = str(document.path)
    return {name: Given(value, origin, name) for name, value in found.items()}


def _threads() -> int:
    given = os.environ.get("OMP_NUM_THREADS", "1")
    return int(given) if given.isdigit() else 1


def write_effective(path: Path, resolved: Resolved) -> None:
    """Write the effective settings into the run directory, each with its origin, and the alert rules."""
    lines = ["[run]"]
    for name in (*_COMMAND, *OWN):
        value = msgspec.to_builtins(getattr(resolved.settings, name), enc_hook=str)
        if value is not None:
            lines.append(f"{name} = {toml(value)}  # {resolved.origins.get(name, 'flag')}")
    alerts = resolved.settings.techniques.get(Alerts)
    rules = write_alerts(alerts.settings) if alerts is not None else ""
    write_sealed(path, "\n".join(lines) + "\n" + to_toml(resolved.choice) + rules)


def read_effective(path: Path) -> dict[str, Any]:
    """Read the effective settings of a run, without their origins, under the names of their flags."""
    document = TomlFile(path)
    return {**document.table("run"), **flat(document)}
