"""Store digests of the first steps after a checkpoint; a job that resumes from it compares its own with them. No torch.

There is one small file per branch, and per position of a sharded model, about its newest checkpoints.
``worker/checkpoint/earlier_results.py`` writes and reads it.
"""

from __future__ import annotations

import logging

import msgspec

from craft.settings.files.sealed import Damaged
from craft.snapshots.store.store import Store

logger = logging.getLogger(__name__)

_FOLDER = "next"
_KEPT = 8
"""Number of checkpoints in a file: the newest one may turn out to be incomplete."""


class NextSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Digests of the steps after one checkpoint."""

    step: int
    """Committed steps of the checkpoint."""
    script: str
    """A hash of the script that computed the steps."""
    digests: dict[int, str]
    """A hash of the state, by the number of committed steps."""


class _Branch(msgspec.Struct, frozen=True, kw_only=True):
    checkpoints: tuple[NextSteps, ...]


def keep(store: Store, branch: int, found: NextSteps, position: int = 0) -> None:
    """Replace what is known of a checkpoint's next steps at ``position``. Raises SnapshotError."""
    path = _path(branch, position)
    others = [each for each in _read(store, path) if each.step != found.step]
    content = _Branch(checkpoints=(*others, found)[-_KEPT:])
    store.put_sealed(path, content)


def read(store: Store, branch: int, step: int, position: int = 0) -> NextSteps | None:
    """Return the digests of the steps after a checkpoint; None if unknown. Raises SnapshotError."""
    return next((each for each in _read(store, _path(branch, position)) if each.step == step), None)


def _path(branch: int, position: int) -> str:
    return f"{_FOLDER}/{branch:04d}{f'-{position}' if position else ''}.json"


def _read(store: Store, path: str) -> tuple[NextSteps, ...]:
    try:
        found = store.get_sealed(path, _Branch)
    except Damaged as error:
        logger.warning("%s is damaged and left out: %s", store.where(path), error)
        found = None
    return found.checkpoints if found is not None else ()
