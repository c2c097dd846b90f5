"""Whose a place for checkpoints is: that of the job which began there last.

Enters: an id that all workers of a job know, and those of no other one. Leaves: the file ``owner``, and a refusal for every job
that another one came after. Two that write to one place would take each other's checkpoints for their own: such as a job that
was taken for dead, and the one that goes on in its stead. ``publish.py`` looks before it lists anything. No torch.
"""

from __future__ import annotations

import logging
import os
import socket
import time

import msgspec
from blake3 import blake3

from craft.protocol.errors import SnapshotError, SnapshotMissing
from craft.settings.files.sealed import Damaged, is_sealed, seal
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
    """The id of the job whose workers share ``key``; without one a process is a job by itself."""
    return blake3(b"owner" + (key or os.urandom(16))).hexdigest(length=8)


def claim(store: Store, job: str) -> None:
    """From now on the place is this job's."""
    owner = _Owner(job=job, host=socket.gethostname(), time=time.time())
    store.put(_OWNER, seal(msgspec.json.encode(owner)))


def check_owner(store: Store, job: str) -> None:
    """Raise StoreTaken if the place is another job's. Where nobody claimed it, it is everybody's."""
    try:
        data = store.get(_OWNER)
        is_sealed(data)
        owner = msgspec.json.decode(data, type=_Owner)
    except SnapshotMissing:
        return
    except (Damaged, msgspec.DecodeError, UnicodeDecodeError) as error:
        logger.warning("%s is damaged, and says no more whose the place is: %s", store.where(_OWNER), error)
        return
    if owner.job != job:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.time))
        raise StoreTaken(
            f"{store.url} belongs to another job, which began there after this one (on host {owner.host}, at {began}): two jobs"
            " need two places; and if the other one goes on in the stead of this one, end this one",
            store.url,
        )
