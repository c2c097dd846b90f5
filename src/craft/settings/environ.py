"""Environment variables of other software: torch, NCCL, the frameworks; and those of ``craft.testing``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

FAULTS = "CRAFT_TEST_FAULTS"
"""Holds the faults that ``craft.testing`` injects, as a JSON list."""
FT_MONITOR = "FT_RANK_MONITOR_IPC_SOCKET"
"""``ft_launcher`` of nvidia-resiliency-ext sets it for its ranks: a monitor waits for heartbeats."""
_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
_PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_OF_MPI = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_NCCL_HOST = "NCCL_HOSTID"
_NCCL_CHUNK, _NCCL_CHUNK_BYTES = "NCCL_P2P_NET_CHUNKSIZE", 1 << 20
"""NCCL sends 128 KiB pieces between hosts by default. Over sockets, this size takes half the time."""


@contextmanager
def without_cuda() -> Iterator[None]:
    """Make torch ask NVML whether there are GPUs: a process that has initialised CUDA cannot fork users of it."""
    is_given = _BY_NVML in os.environ
    os.environ.setdefault(_BY_NVML, "1")
    try:
        yield
    finally:
        if not is_given:
            del os.environ[_BY_NVML]


@contextmanager
def hidden_from_accelerate() -> Iterator[None]:
    """Make this process look to accelerate like one that runs alone."""
    hidden = {name: os.environ.pop(name) for name in (*_PLACE, *_OF_MPI) if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def prepare_nccl(num_devices: int) -> None:
    """Set variables of NCCL that the user has not set; call it before NCCL is first used.

    If a host has more workers than GPUs, NCCL must take each worker for a separate host: it refuses two ranks on one device of
    one host.
    """
    os.environ.setdefault(_NCCL_CHUNK, str(_NCCL_CHUNK_BYTES))
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if workers > num_devices and _NCCL_HOST not in os.environ:
        worker_id = os.environ.get("CRAFT_WORKER_ID", str(os.getpid()))
        os.environ[_NCCL_HOST] = f"craft-{os.environ.get('CRAFT_HOST', '')}-{worker_id}"


def lightning_seed() -> int:
    """Return the seed that the script gave to Lightning's ``seed_everything``; 0 if it gave none."""
    return int(os.environ.get("PL_GLOBAL_SEED") or 0)


def is_ft_monitored() -> bool:
    """Return whether a monitor of ``ft_launcher`` waits for this process's heartbeats."""
    return FT_MONITOR in os.environ


def torchft_lighthouse() -> str | None:
    """Return the URL of torchft's lighthouse; None if it is not set."""
    return os.environ.get("TORCHFT_LIGHTHOUSE") or None


def read_faults() -> str | None:
    """Return the text of ``CRAFT_TEST_FAULTS``; None if it is not set."""
    return os.environ.get(FAULTS) or None


def set_world(rank: int, size: int) -> None:
    """Make the script see its replica as its world."""
    os.environ["RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = str(size)
