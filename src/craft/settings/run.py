"""Settings of ``craft run``: flag over ``CRAFT_*`` variable over ``craft.toml`` over default, with their origin."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from craft.decide.alerts import AlertSettings
from craft.decide.divergence import DivergenceAnswer
from craft.decide.hangs import HangLimits
from craft.decide.interval import parse_every
from craft.decide.settle import LossAnswer
from craft.protocol.errors import ConfigError
from craft.settings.alerts import write_alerts
from craft.settings.worker import WorkerSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that ``craft run`` needs to know."""

    script: str
    arguments: tuple[str, ...] = ()
    as_module: bool = False
    workers: int = 1
    """Workers of this host."""
    spares: int = 0
    """Further workers of this host, which wait at their first step until a slot is free."""
    min_workers: int = 1
    """Give up when fewer are left and nobody can replace them."""
    max_restarts: int = 1000
    """Workers that are started on this host in the place of lost ones; 0: lost ones stay lost."""
    on_loss: LossAnswer = "redo"
    """What becomes of a lost worker's microbatches: redo (exact), shrink (dropped), or wait for who takes its place."""
    wait_limit_s: float = 60.0
    """How long that is waited for (with ``wait``, or when fewer than ``min_workers`` are left)."""
    hang_limit_s: float = 10.0
    """Nothing that a worker does is taken for a hang before this."""
    hang_factor: float = 20.0
    """It is after this many times the longest that it took recently."""
    first_step_limit_s: float = 600.0
    """Holds instead in the first steps of a worker."""
    stop_limit_s: float = 0.5
    """A worker that is stopped by a signal is lost after this."""
    drain_limit_s: float = 30.0
    """After SIGTERM, workers have this long to leave at a step boundary; in a job of its own, after one more checkpoint."""
    lease_s: float = 10.0
    """A worker whose exchange broke ends when its agent could not reach the lighthouse for this long."""
    checkpoints: str | None = None
    """Where checkpoints go: a path, or a URL that fsspec knows, such as s3://bucket/job."""
    checkpoint_local: str | None = None
    """A fast directory of each host, to which they are written first."""
    checkpoint_every: str | None = None
    """How often: ``auto``, or such as ``500 steps`` or ``10 min``; by default what the script says, or else ``auto``."""
    checkpoint_keep: int | None = None
    """How many are kept, besides those with a tag; by default what the script says, or else 3."""
    resume: str | None = None
    """Begin from a checkpoint: ``auto`` (the newest good one, a fresh start where there is none), or its step."""
    on_divergence: DivergenceAnswer = "report"
    """What is done about a loss or a gradient that is not finite."""
    preempt_file: Path | None = None
    """When this file appears, the job makes room: it takes a checkpoint and ends with exit code 75."""
    chaos: bool = False
    """Whether this job is there for faults to be injected: ``craft chaos`` then asks nobody."""
    threads: int = 1
    """OMP_NUM_THREADS of every worker: part of the job's identity, since bits depend on it."""
    port: int = 0
    """Port of the lighthouse; 0 picks a free one."""
    lighthouse: str | None = None
    """URL of a running lighthouse; by default one is started."""
    token_file: Path | None = None
    tls_ca: Path | None = None
    """Certificates by which that of a lighthouse at https:// is verified; by default those this machine trusts."""
    check_bits: bool = True
    """Compare the bits of one microbatch between all workers in the first step."""
    digest_bytes: int = 32768
    """How much of the state is compared between the workers in every step; 0 switches it off."""
    bucket_mb: float = 25.0
    """Size limit of a gradient bucket, in MiB."""
    host: str = ""
    """Name of this host."""
    address: str = "127.0.0.1"
    """Where workers on other hosts reach those of this one."""

    @property
    def worker_prefix(self) -> str:
        """Worker ids are unique in the job: with a lighthouse of its own, a host needs no name in them."""
        return "w" if self.lighthouse is None else f"{self.host}-w"

    @property
    def hang_limits(self) -> HangLimits:
        return HangLimits(
            hang_limit_s=self.hang_limit_s,
            hang_factor=self.hang_factor,
            first_step_limit_s=self.first_step_limit_s,
            stop_limit_s=self.stop_limit_s,
        )

    def worker_settings(
        self,
        worker_id: str,
        place: int,
        *,
        socket: str,
        run_dir: Path,
        activity: Path,
        state_key: str,
        late: bool,
        carried_bytes: int,
    ) -> WorkerSettings:
        return WorkerSettings(
            worker_id=worker_id,
            host=self.host,
            address=self.address,
            socket=socket,
            run_dir=run_dir,
            activity=activity,
            state_key=state_key,
            late=late,
            carried_bytes=carried_bytes,
            local_rank=place,
            on_loss=self.on_loss,
            check_bits=self.check_bits,
            digest_bytes=self.digest_bytes,
            bucket_mb=self.bucket_mb,
            checkpoints=self.checkpoints,
            checkpoint_local=self.checkpoint_local,
            checkpoint_every=self.checkpoint_every,
            checkpoint_keep=self.checkpoint_keep,
            resume=self.resume,
            on_divergence=self.on_divergence,
        )


_COMMAND = frozenset({"script", "arguments", "as_module"})
"""Given on the command line alone."""


def resolve(flags: Mapping[str, Any], config: Path | None) -> tuple[RunSettings, dict[str, str]]:
    """Return the effective settings, and where each of them came from."""
    values: dict[str, Any] = {"host": socket.gethostname(), "threads": _threads()}
    origins = dict.fromkeys(RunSettings.__struct_fields__, "default")
    for source, found in (
        (str(config), _from_file(config)),
        ("environment", _from_environment()),
        ("flag", {name: value for name, value in flags.items() if value is not None}),
    ):
        values.update(found)
        origins.update(dict.fromkeys(found, source))
    try:
        settings = msgspec.convert(values, RunSettings, strict=False, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise ConfigError(f"settings: {error}") from None
    _check(settings)
    return settings, origins


def _check(settings: RunSettings) -> None:
    if settings.workers < 1:
        raise ConfigError(f"--workers {settings.workers}: a job needs at least 1 worker")
    if not 1 <= settings.min_workers <= settings.workers and settings.lighthouse is None:
        raise ConfigError(f"--min-workers {settings.min_workers} must be between 1 and --workers {settings.workers}")
    if settings.spares < 0 or settings.max_restarts < 0:
        raise ConfigError("--spares and --max-restarts must be at least 0")
    if settings.checkpoints == "":
        raise ConfigError("--checkpoints '': say where they go: a path, or such as s3://bucket/job")
    if settings.checkpoint_keep is not None and settings.checkpoint_keep < 1:
        raise ConfigError(f"--checkpoint-keep {settings.checkpoint_keep}: at least 1 must be kept")
    if settings.checkpoint_every is not None:
        parse_every(settings.checkpoint_every)
    if settings.resume is not None and settings.resume != "auto" and not settings.resume.isdigit():
        raise ConfigError(f"--resume {settings.resume}: give the number of a step, or auto")
    if settings.threads < 1:
        raise ConfigError(f"--threads {settings.threads}: a worker needs at least 1 thread")
    if settings.lighthouse is not None and settings.token_file is None:
        raise ConfigError("--lighthouse needs --token-file: the file with the token of that lighthouse")
    if settings.lighthouse is not None and settings.chaos:
        raise ConfigError("--chaos is for the lighthouse: give it to 'craft lighthouse', not to the hosts of its job")
    if settings.tls_ca is not None and not (settings.lighthouse or "").startswith("https://"):
        raise ConfigError("--tls-ca is for a lighthouse at https://: name one with --lighthouse")
    if not settings.as_module and not Path(settings.script).is_file():
        raise ConfigError(f"there is no script {settings.script}: give the path of a Python file (or a module with -m)")


def _threads() -> int:
    given = os.environ.get("OMP_NUM_THREADS", "1")
    return int(given) if given.isdigit() else 1


def _from_environment() -> dict[str, Any]:
    names = (name for name in RunSettings.__struct_fields__ if name not in _COMMAND)
    return {name: os.environ[key] for name in names if (key := f"CRAFT_{name.upper()}") in os.environ}


def _from_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        values = tomllib.loads(path.read_text()).get("run", {})
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    for key in values:
        if key not in RunSettings.__struct_fields__ or key in _COMMAND:
            import difflib

            near = difflib.get_close_matches(key, RunSettings.__struct_fields__, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{path}: [run] has no setting {key!r}{hint}")
    return dict(values)


def write_effective(
    path: Path, settings: RunSettings, origins: Mapping[str, str], alerts: AlertSettings | None = None
) -> None:
    """Write the effective settings into the run directory, each with its origin, and the rules for alerts."""
    lines = ["[run]"]
    for name, value in msgspec.to_builtins(settings, enc_hook=str).items():
        if value is not None:
            lines.append(f"{name} = {_toml(value)}  # {origins[name]}")
    path.write_text("\n".join(lines) + "\n" + write_alerts(alerts or AlertSettings()))


def read_effective(path: Path) -> dict[str, Any]:
    """Read the effective settings of a run back, without their origins."""
    try:
        return dict(tomllib.loads(path.read_text()).get("run", {}))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _toml(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _path(kind: type, value: object) -> object:
    if kind is Path:
        return Path(str(value))
    raise NotImplementedError(kind)
