"""What an agent tells a worker through its environment."""

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
    """File in memory in which this worker says what it is doing; None: it does not."""
    carried_bytes: int = 0
    """How much memory the state of the job will take here beside that of the model; 0: not known."""
    state_key: str = ""
    """The key, in hexadecimal, by which workers of one job know each other when they hand over state."""
    local_rank: int = 0
    late: bool = False
    """A spare, or one in the place of a lost worker: it takes part when it has come to its first step, not before."""
    check_bits: bool = True
    """Compute microbatch 0 on every worker in the first step, and one of another worker in a later one; compare the bits."""
    check_script: bool = True
    """Look at the script's loop in its first steps, and refuse what would give a wrong result unseen."""
    digest_bytes: int = 32768
    """How much of the state is hashed in each step to find silent divergence; 0 switches it off."""
    bucket_mb: float = 25.0
    """Size limit of a gradient bucket; the first one is at most 1 MiB, so that the exchange begins early."""
    group: Literal["auto", "gloo", "nccl"] = "auto"
    """What carries gradients between workers; auto: NCCL between GPUs, Gloo between CPUs."""
    hold: Hold = "device"
    """Where gradients that were sent are held until the step is committed."""
    resume: str | None = None
    """``auto`` or the number of a step; None: a fresh start."""
    techniques: str = ""
    """Those that are on, with their settings, as JSON; empty outside of ``craft run``."""

    def chosen(self) -> Chosen:
        """The techniques that are on."""
        return from_json(self.techniques) if self.techniques else alone()

    @property
    def state_key_bytes(self) -> bytes:
        return bytes.fromhex(self.state_key)

    @classmethod
    def from_environment(cls) -> WorkerSettings:
        """Read the ``CRAFT_*`` variables of this process."""
        values = {name: os.environ[key] for name, key in _KEYS.items() if key in os.environ}
        try:
            return msgspec.convert(values, cls, strict=False, dec_hook=_path)
        except msgspec.ValidationError as error:
            key = key_in(error) or ""
            said = f"{_KEYS.get(key, 'CRAFT_*')}={values.get(key, '')}"
            raise ConfigError(f"{said}: {complaint(error, cls, values)}") from None

    def shared(self) -> dict[str, int | float | str | bool | None]:
        """What must be the same on every worker of the job."""
        return {
            "check_bits": self.check_bits,
            "digest_bytes": self.digest_bytes,
            "bucket_mb": self.bucket_mb,
            "group": self.group,
        }

    def to_environment(self) -> Mapping[str, str]:
        """The variables from which ``from_environment`` makes this value again."""
        values = msgspec.structs.asdict(self)
        return {key: str(values[name]) for name, key in _KEYS.items() if values[name] is not None}


def multiprocessing_folder(activity: Path) -> Path:
    """Return where Python's multiprocessing keeps the sockets of a worker, given the file in which it says what it does."""
    return activity.with_suffix(".mp")


_KEYS = {name: f"CRAFT_{name.upper()}" for name in WorkerSettings.__struct_fields__}


def _path(kind: type, value: object) -> object:
    if kind is Path:
        return Path(str(value))
    raise NotImplementedError(kind)
