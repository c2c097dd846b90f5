"""What NCCL reads from the environment, and what it must find there when workers share a GPU."""

from __future__ import annotations

import os

_OWN_HOST = "NCCL_HOSTID"
_CHUNK, _CHUNK_BYTES = "NCCL_P2P_NET_CHUNKSIZE", 1 << 20
"""Sends between hosts go in pieces of 128 KiB by default. Over sockets, pieces of this size took half the time."""


def prepare(num_devices: int) -> None:
    """Set what the user has not set; only before NCCL is first used.

    Where a host has more workers than GPUs, NCCL is to take each for a host of its own: it refuses two ranks on one device
    of one host.
    """
    os.environ.setdefault(_CHUNK, str(_CHUNK_BYTES))
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if workers > num_devices and _OWN_HOST not in os.environ:
        os.environ[_OWN_HOST] = (
            f"craft-{os.environ.get('CRAFT_HOST', '')}-{os.environ.get('CRAFT_WORKER_ID', str(os.getpid()))}"
        )
