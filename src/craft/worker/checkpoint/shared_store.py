"""Check that all workers write checkpoint shares to one store: a path may be another disk on each host.

Input: each worker's view of the store, before the first step. Output: nothing, or a refusal that names the worker that does not
see rank 0's file: no checkpoint would ever be complete. ``rollback.begin_from`` calls it, on every worker.
"""

from __future__ import annotations

import os
import time

from craft.protocol.errors import Refused, SnapshotMissing
from craft.snapshots.store.manifest import PARTS
from craft.snapshots.store.store import Store
from craft.worker.membership.ft_calls import exchange
from craft.worker.membership.participant import Participant

_PATIENCE_S = 5.0
_LOOK_S = 0.1


def check_one_store(store: Store, participant: Participant) -> None:
    """Raise Refused, on every worker, unless all find rank 0's file; SnapshotError if the store does not answer."""
    ledger = participant.ledger
    if len(ledger.members) == 1:
        return
    # If it is left behind, garbage collection sees a part of no checkpoint.
    own = f"{PARTS}/seen-{os.urandom(8).hex()}" if ledger.rank == 0 else ""
    if own:
        store.put(own, b"{}")
    try:
        mark = exchange(participant, own.encode())[0].decode()
        found = b"" if _finds(store, mark) else store.url.encode()
        elsewhere = exchange(participant, found)
    finally:
        if own:
            store.remove([own])
    # A worker that refuses ends the job, and rank 0 with it, perhaps before it has removed its file.
    exchange(participant, b"")
    for worker_id, url in zip(ledger.members, elsewhere, strict=True):
        if url:
            raise Refused(
                f"checkpoints cannot be complete: {url.decode()} of {worker_id} is another place than that of"
                f" {ledger.members[0]}, which wrote a file that is not there; give all workers, on all hosts, one place that"
                " all of them see"
            )


def _finds(store: Store, path: str) -> bool:
    """Return whether a file exists; network file systems may show another host's file late."""
    give_up = time.monotonic() + _PATIENCE_S
    while True:
        try:
            store.get(path)
            return True
        except SnapshotMissing:
            if time.monotonic() > give_up:
                return False
            time.sleep(_LOOK_S)
