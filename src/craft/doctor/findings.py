"""What was measured on a machine, and what is to be said of it: values of ``craft doctor``."""

from __future__ import annotations

from typing import Literal

import msgspec


class TokenFile(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    mode: int
    own: bool
    """Whether it belongs to whoever asks."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Found without torch. None: could not be found out."""

    python: str
    cpus: float
    """That this process may use, by its affinity and its control group."""
    memory_bytes: int
    """That is free."""
    shared_bytes: int | None
    """Free in ``/dev/shm``."""
    open_files: int
    pidfd: bool
    """Whether the kernel tells of a process's end by a file."""
    synchronised: bool | None
    """Whether the kernel thinks that its clock is right."""
    ports: int | None
    """How many the kernel may give out by itself."""
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
    """Found by a process that imports torch."""

    version: str
    threads: int
    abort_ms: float | None = None
    """From the abort of a Gloo group until whoever was blocked in it came out; None: it did not."""
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
