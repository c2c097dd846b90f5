"""Remove checkpoints beyond those to keep, and chunks that are no longer needed. No torch.

It may be killed at any instant: manifests go first, so that none is listed without its chunks, and left-over chunks are found
the next time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from craft.protocol.errors import SnapshotCorrupt, SnapshotError, SnapshotMissing
from craft.snapshots.checkpoint.suspect import SuspectCheckpoints
from craft.snapshots.store.manifest import (
    CHUNKS,
    MANIFESTS,
    PARTS,
    Manifest,
    hashes_in,
    is_newer,
    place_of_name,
    read_manifest,
)
from craft.snapshots.store.store import Found, Guard, Store, StoreBusy

logger = logging.getLogger(__name__)

OVERDUE_S = 3600.0
"""A part older than the newest checkpoint, written this long ago, will not become one."""
DEAD_S = 24 * 3600.0
"""Nor will any part written this long ago."""
_MIN_UNFINISHED = 2
_PATIENCE_S = 2.0
_LOOK_S = 0.1
_BATCH = 50
"""Files removed between two checks that removing is still allowed."""


class Collected(NamedTuple):
    """What was removed, or would be."""

    manifests: tuple[str, ...]
    """Names of checkpoints."""
    parts: tuple[str, ...]
    chunks: tuple[str, ...]
    freed_bytes: int


def collect(store: Store, keep: int, now: float, dry_run: bool = False, unwanted: Collection[str] = ()) -> Collected:
    """Keep the newest ``keep`` checkpoints without a tag and all that have one; remove the others and what only they need.

    ``unwanted``: names of checkpoints to remove in any case. ``now`` is in seconds since 1970. Raises StoreBusy if another
    process writes or collects, and SnapshotError for a manifest of a newer CRAFT, whose needs are unknown.
    """
    if dry_run:
        return _survey(store, keep, now, unwanted)
    with store.collecting("collect") as guard:
        guard.tidy()
        found = _survey(store, keep, now, unwanted)
        _remove(store, guard, [f"{MANIFESTS}/{name}.json" for name in found.manifests])
        _remove(store, guard, found.parts)
        _remove(store, guard, found.chunks)
        return found


def apply_keep(store: Store, keep: int) -> None:
    """Collect garbage if the store is free; log errors."""
    give_up = time.monotonic() + _PATIENCE_S
    while True:
        try:
            collect(store, keep, time.time())
        except StoreBusy as error:
            # Other members are about to finish the same checkpoint.
            if time.monotonic() < give_up:
                time.sleep(_LOOK_S)
                continue
            logger.info("old checkpoints stay for now: %s", error)
        except Exception:
            # The writing thread must not end because of it.
            logger.exception("old checkpoints could not be removed from %s", store.url)
        return


def _remove(store: Store, guard: Guard, paths: Sequence[str]) -> None:
    for first in range(0, len(paths), _BATCH):
        guard.check()
        store.remove(paths[first : first + _BATCH])


def _survey(store: Store, keep: int, now: float, unwanted: Collection[str]) -> Collected:
    # Parts before manifests: a publisher writes the manifest before it removes the parts.
    parts = store.files(PARTS)
    needed = set().union(*map(hashes_in, store.pinned()))
    needed_by_part = {part.path: hashes_in(data) for part in parts if (data := _get(store, part.path)) is not None}
    kept, dropped = _divide(store, keep, needed, unwanted)
    dead = {part.path for part in parts if _is_dead(part, parts, [*kept, *dropped], keep, now)}
    for path, hashes in needed_by_part.items():
        if path not in dead:
            needed |= hashes
    for manifest in kept:
        needed |= {ref.hash for ref in manifest.refs}
    garbage = [chunk for chunk in store.files(CHUNKS) if chunk.path.rpartition("/")[2] not in needed]
    return Collected(
        manifests=tuple(manifest.name for manifest in dropped),
        parts=tuple(sorted(dead)),
        chunks=tuple(chunk.path for chunk in garbage),
        freed_bytes=sum(chunk.size for chunk in garbage),
    )


def _get(store: Store, path: str) -> bytes | None:
    try:
        return store.get(path)
    except SnapshotMissing:
        return None


def _divide(
    store: Store, keep: int, needed: set[str], unwanted: Collection[str]
) -> tuple[list[Manifest], list[Manifest]]:
    """Return the manifests to keep and to remove. A damaged one stays; the chunks it names are added to ``needed``."""
    found: list[Manifest] = []
    for file in store.files(MANIFESTS):
        data = _get(store, file.path)
        if data is None:
            continue
        try:
            found.append(read_manifest(data, store.where(file.path)))
        except SnapshotCorrupt as error:
            if is_newer(data):
                raise SnapshotError(f"no garbage can be collected: {error}", store.where(file.path)) from None
            needed |= hashes_in(data)
    found.sort(key=lambda each: each.order)
    untagged = [manifest for manifest in found if manifest.tag is None]
    doubts = SuspectCheckpoints([store])
    trusted = [manifest for manifest in untagged if doubts.about(manifest) is None]
    # Always keep the one taken last, whatever its step. Checkpoints that may hold wrong bits do not displace good ones.
    staying = {each.name for each in (*untagged[-keep:], *trusted[-keep:])}
    if found:
        staying.add(max(found, key=lambda each: each.time).name)
    staying |= {each.name for each in found if each.tag is not None}
    kept = [manifest for manifest in found if manifest.name in staying and manifest.name not in unwanted]
    return kept, [manifest for manifest in found if manifest not in kept]


def _is_dead(part: Found, parts: Sequence[Found], manifests: Sequence[Manifest], keep: int, now: float) -> bool:
    """Return whether the checkpoint of a part is complete already, or never will be."""
    name = _name(part)
    if place_of_name(name) is None or now - part.modified > DEAD_S:
        return True
    if any(manifest.name == name for manifest in manifests):
        return True
    if now - part.modified > OVERDUE_S and any(manifest.name > name for manifest in manifests):
        return True
    # In a host's fast store of a job with several hosts nothing is ever complete: keep only the newest there, too.
    return len({_name(each) for each in parts if _name(each) > name}) >= max(keep, _MIN_UNFINISHED)


def _name(part: Found) -> str:
    return part.path.split("/")[1]
