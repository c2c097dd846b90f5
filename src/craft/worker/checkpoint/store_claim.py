"""Make sure that this job can write its checkpoints: to one store that all workers see, and that no other job owns.

Input: each worker's view of the stores, before the first step. Output: nothing, or a refusal that names the worker that does not
see rank 0's file: no checkpoint would ever be complete. ``Resume`` calls it, on every worker.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass

from craft.protocol.errors import Refused, SnapshotError, SnapshotMissing
from craft.protocol.events import ScriptWarned
from craft.snapshots.store.manifest import CHUNKS, MANIFESTS, PARTS
from craft.snapshots.store.owner import claim
from craft.snapshots.store.store import Store
from craft.snapshots.store.tiers import Tiers
from craft.worker.membership.ft_calls import exchange
from craft.worker.membership.participant import Participant
from craft.worker.report.reporter import Reporter

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0
_LOOK_S = 0.1


@dataclass(frozen=True, eq=False)
class StoreClaim:
    """The checks of one worker before the first checkpoint. Owned by the main thread."""

    _tiers: Tiers
    _participant: Participant
    _reporter: Reporter

    def check_writable(self) -> None:
        """Raise Refused if the workers cannot all write to one store: better now than at the first checkpoint."""
        try:
            for store in self._tiers.nearest_first:
                with store.writing(self._participant.ledger.worker_id):
                    pass
            check_one_store(self._tiers.durable, self._participant)
        except SnapshotError as error:
            raise Refused(f"checkpoints cannot be written: {error}") from error

    def claim(self) -> None:
        """Claim the store for this job, so that no other job writes there. Raises Refused if that fails."""
        if self._participant.ledger.rank == 0:
            try:
                claim(self._tiers.durable, self._tiers.owner)
            except SnapshotError as error:
                raise Refused(f"checkpoints cannot be written: {error}") from error

    def warn_of_rests(self) -> None:
        """Warn, on the leader, if a job that should resume begins anew in a store that holds data."""
        if self._participant.ledger.rank != 0:
            return
        store = self._tiers.durable
        if store.files(CHUNKS) or store.files(PARTS):
            text = (
                f"--resume: {store.url} holds parts of checkpoints and lists none: either none was ever complete, or the files in"
                f" {MANIFESTS}/ were removed. The job begins anew, and what is there is removed after its next checkpoint"
            )
            logger.warning("%s", text)
            self._reporter.note(ScriptWarned(text=text))


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
