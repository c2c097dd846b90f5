"""The measurements of a machine and the findings about it: values of ``craft doctor``."""

from __future__ import annotations

from typing import Literal

import msgspec


class TokenFile(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    mode: int
    own: bool
    """Whether it belongs to the current user."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Measured without torch. None: could not be measured."""

    python: str
    cpus: float
    """Available to this process, by its affinity and its control group."""
    memory_bytes: int
    """Free memory."""
    shared_bytes: int | None
    """Free in ``/dev/shm``."""
    open_files: int
    pidfd: bool
    """Whether the kernel has pidfds, which report the end of a process."""
    synchronised: bool | None
    """Whether the kernel considers its clock synchronised."""
    ports: int | None
    """Size of the ephemeral port range."""
    loopback_mb_s: float | None
    folder: str
    folder_free_bytes: int | None
    folder_mb_s: float | None
    """Written and synced."""
    tokens: tuple[TokenFile, ...] = ()
    gpu_health: str | None = None
    """Why NVML is not available; None: it is."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    free_bytes: int
    total_bytes: int
    to_host_gb_s: float
    """Into pinned memory."""
    to_device_gb_s: float


class Torch(msgspec.Struct, frozen=True, kw_only=True):
    """Measured by a process that imports torch."""

    version: str
    threads: int
    abort_ms: float | None = None
    """From the abort of a Gloo group until the blocked call returned; None: it did not."""
    abort_error: str = ""
    cuda: str | None = None
    nccl: str | None = None
    devices: tuple[Device, ...] = ()


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the answer."""

    subject: str
    grade: Literal["ok", "warning", "problem"]
    found: str
    advice: str = ""
    """What to do next."""
