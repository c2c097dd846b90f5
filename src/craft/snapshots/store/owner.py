"""Record which job owns a store: the one that began there last. No torch.

Two jobs that write to one store would mix up their checkpoints: such as a job that was taken for dead, and its successor.
``publish.py`` checks before it lists anything.
"""

from __future__ import annotations

import logging
import os
import socket
import time

import msgspec
from blake3 import blake3

from craft.protocol.errors import SnapshotError
from craft.settings.files.sealed import Damaged
from craft.snapshots.store.store import Store

logger = logging.getLogger(__name__)

_OWNER = "owner"


class StoreTaken(SnapshotError):
    """Another job writes there."""


class _Owner(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    host: str
    time: float


def job_of(key: bytes) -> str:
    """Return the id of the job whose workers share ``key``; without a key, a process is a job by itself."""
    return blake3(b"owner" + (key or os.urandom(16))).hexdigest(length=8)


def claim(store: Store, job: str) -> None:
    """Make this job the owner of the store."""
    store.put_sealed(_OWNER, _Owner(job=job, host=socket.gethostname(), time=time.time()))


def check_owner(store: Store, job: str) -> None:
    """Raise StoreTaken if another job owns the store. A store without an owner is open to all."""
    try:
        owner = store.get_sealed(_OWNER, _Owner)
    except Damaged as error:
        logger.warning("%s is damaged, so that the owner of the store is unknown: %s", store.where(_OWNER), error)
        return
    if owner is not None and owner.job != job:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.time))
        raise StoreTaken(
            f"{store.url} belongs to another job, which began there after this one (on host {owner.host}, at {began}): two jobs"
            " need two places; if the other one replaces this one, end this one",
            store.url,
        )
