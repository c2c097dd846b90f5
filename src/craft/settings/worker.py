"""Settings that an agent passes to a worker through its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from craft.decide.step.gradient_memory import Hold
from craft.decide.techniques.technique import Chosen
from craft.protocol.errors import ConfigError
from craft.settings.files.toml_file import complaint, key_in
from craft.settings.techniques import alone, from_json


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one worker process."""

    worker_id: str = "w0"
    host: str = "localhost"
    address: str = "127.0.0.1"
    """Where other workers reach this one."""
    socket: str | None = None
    """The agent's Unix socket; None outside of ``craft run``."""
    run_dir: Path | None = None
    activity: Path | None = None
    """File in memory on which this worker publishes its activity; None: it does not."""
    carried_bytes: int = 0
    """Memory for the job's state in this process beside the model; 0: unknown."""
    state_key: str = ""
    """The key, in hexadecimal, by which workers authenticate state transfers."""
    local_rank: int = 0
    replica_size: int = 1
    """Workers that hold one copy of the model together."""
    position: int = 0
    """This worker's place in its replica, from 0; never changed."""
    late: bool = False
    """A spare or a replacement: it takes part from its first step on, not before."""
    check_bits: bool = True
    """Compute microbatch 0 on every worker in the first step, and one of another worker in a later one; compare the bits."""
    check_script: bool = True
    """Check the script's loop in its first steps, and refuse what would silently give a wrong result."""
    digest_bytes: int = 32768
    """How much of the state is hashed in each step to find silent divergence; 0 switches it off."""
    bucket_mb: float = 25.0
    """Size limit of a gradient bucket; the first one is at most 1 MiB, so that the exchange begins early."""
    group: Literal["auto", "gloo", "nccl"] = "auto"
    """Transport of gradients between workers; auto: NCCL between GPUs, Gloo between CPUs."""
    hold: Hold = "device"
    """Where sent gradients are held until the step is committed."""
    resume: str | None = None
    """``auto`` or the number of a step; None: a fresh start."""
    techniques: str = ""
    """The enabled techniques with their settings, as JSON; empty outside of ``craft run``."""

    def chosen(self) -> Chosen:
        """Return the enabled techniques."""
        return from_json(self.techniques) if self.techniques else alone()

    @property
    def state_key_bytes(self) -> bytes:
        return bytes.fromhex(self.state_key)

    @classmethod
    def from_environment(cls) -> WorkerSettings:
        """Read the ``CRAFT_*`` variables of this process."""
        values = {name: os.environ[key] for name, key in _KEYS.items() if key in os.environ}
        try:
            return msgspec.convert(values, cls, strict=False, dec_hook=as_path)
        except msgspec.ValidationError as error:
            key = key_in(error) or ""
            said = f"{_KEYS.get(key, 'CRAFT_*')}={values.get(key, '')}"
            raise ConfigError(f"{said}: {complaint(error, cls, values)}") from None

    def shared(self) -> dict[str, int | float | str | bool | None]:
        """Return the settings that must be the same on every worker of the job."""
        return {
            "check_bits": self.check_bits,
            "digest_bytes": self.digest_bytes,
            "bucket_mb": self.bucket_mb,
            "group": self.group,
        }

    def to_environment(self) -> Mapping[str, str]:
        """Return the variables from which ``from_environment`` makes this value again."""
        values = msgspec.structs.asdict(self)
        return {key: str(values[name]) for name, key in _KEYS.items() if values[name] is not None}


def multiprocessing_folder(activity: Path) -> Path:
    """Return where multiprocessing keeps the sockets of a worker, beside its activity file."""
    return activity.with_suffix(".mp")


_KEYS = {name: f"CRAFT_{name.upper()}" for name in WorkerSettings.__struct_fields__}


def as_path(kind: type, value: object) -> object:
    """Convert a text to a Path, for msgspec."""
    if kind is Path:
        return Path(str(value))
    raise NotImplementedError(kind)
