"""Mark checkpoints that may hold wrong bits: those since the last step at which all workers agreed on the whole state.

A file in every store covers all later steps of a branch, so that it also applies to checkpoints still being written. No torch.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

import msgspec

from craft.settings.files.sealed import Damaged
from craft.snapshots.store.manifest import Manifest
from craft.snapshots.store.store import Store

logger = logging.getLogger(__name__)

SUSPECT = "suspect"
_PATH = re.compile(rf"{SUSPECT}/(\d{{4,}})-(\d{{12,}})-(\d{{12,}})\.json")
_SHOWN = 160


class Suspicion(msgspec.Struct, frozen=True, kw_only=True):
    """Bits differed, perhaps since ``after``."""

    branch: int
    after: int
    """Committed steps of the last state that was known to be the same on all workers."""
    step: int
    """The step in which it was found."""
    reason: str = ""

    @property
    def path(self) -> str:
        return f"{SUSPECT}/{self.branch:04d}-{self.after:012d}-{self.step:012d}.json"

    def __str__(self) -> str:
        return (
            f"it may hold wrong bits: in step {self.step} bits differed between workers; the whole state was last known to be the"
            f" same after {self.after} steps ({self.reason[:_SHOWN]})"
        )


def mark(stores: Iterable[Store], suspicion: Suspicion) -> None:
    """Mark all checkpoints that ``suspicion`` covers as suspect, in all stores. Raises SnapshotError on a failed write."""
    for store in stores:
        store.put_sealed(suspicion.path, suspicion)


class SuspectCheckpoints:
    """The checkpoints that are marked in some stores as suspect."""

    def __init__(self, stores: Iterable[Store]) -> None:
        """Raise SnapshotError if a store does not answer."""
        found = (_read(store, file.path) for store in stores for file in store.files(SUSPECT))
        self._found = [each for each in found if each is not None]

    @property
    def branches(self) -> frozenset[int]:
        """Branches with suspect checkpoints: a job that resumes begins another one."""
        return frozenset(each.branch for each in self._found)

    def about(self, manifest: Manifest) -> Suspicion | None:
        """Return why a checkpoint is suspect; None if it is not."""
        if manifest.kind != "job":
            return None
        own = (each for each in self._found if each.branch == manifest.branch and each.after < manifest.step)
        return next(own, None)


def _read(store: Store, path: str) -> Suspicion | None:
    named = _PATH.fullmatch(path)
    if named is None:
        logger.warning("%s is not a file of a store: ignored", store.where(path))
        return None
    branch, after, step = map(int, named.groups())
    try:
        return store.get_sealed(path, Suspicion)
    except Damaged:
        # Its name says what it is about.
        return Suspicion(branch=branch, after=after, step=step, reason=f"{store.where(path)} is damaged")
