"""Environment variables of NCCL, and the values that workers need who share a GPU."""

from __future__ import annotations

import os

_OWN_HOST = "NCCL_HOSTID"
_CHUNK, _CHUNK_BYTES = "NCCL_P2P_NET_CHUNKSIZE", 1 << 20
"""NCCL sends 128 KiB pieces between hosts by default. Over sockets, this size takes half the time."""


def prepare(num_devices: int) -> None:
    """Set variables that the user has not set; call it before NCCL is first used.

    If a host has more workers than GPUs, NCCL must take each worker for a separate host: it refuses two ranks on one device of
    one host.
    """
    os.environ.setdefault(_CHUNK, str(_CHUNK_BYTES))
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if workers > num_devices and _OWN_HOST not in os.environ:
        os.environ[_OWN_HOST] = (
            f"craft-{os.environ.get('CRAFT_HOST', '')}-{os.environ.get('CRAFT_WORKER_ID', str(os.getpid()))}"
        )
