"""Write one member's share of a checkpoint into a store; the last member also lists the checkpoint.

In: a share in memory, or in another store. Out: chunks, then the member's part, then the manifest, by the member that finds
all parts present, and events. Members do not talk to each other. ``writer.py`` and ``tier_copier.py`` call it, on their threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from craft.protocol.errors import SnapshotMissing
from craft.protocol.events import AnyNote, CheckpointFailed, CheckpointWritten
from craft.snapshots.store.background import lower_priority
from craft.snapshots.store.manifest import (
    CHUNKS,
    PARTS,
    Manifest,
    Part,
    chunk_path,
    manifest_path,
    merge,
    part_path,
    read_manifest,
    read_part,
    seal,
)
from craft.snapshots.store.owner import check_owner
from craft.snapshots.store.store import Adding, Store, StoreBusy

logger = logging.getLogger(__name__)

T = TypeVar("T")


def write_share(
    store: Store, who: str, write: Callable[[Adding], Part], owner: str = ""
) -> tuple[Part, Manifest | None]:
    """Write the share of one member: ``write`` adds its chunks and returns them. ``owner``: the job that must own the store.

    Returns the part, and the manifest if the checkpoint is complete and this call announces it.
    """
    with store.writing(who) as guard:
        with store.adding() as adding:
            part = write(adding)
        path = part_path(part.name, part.part, part.of)
        if owner:
            check_owner(store, owner)
        guard.check()
        store.put(path, seal(part))
        try:
            # Check again: a collector that took this writer for dead may have removed chunks.
            guard.check()
        except StoreBusy:
            store.remove([path])
            raise
        # Still guarded: the parts, which keep the chunks until there is a manifest, are about to go.
        return part, publish(store, part)


def publish(store: Store, part: Part) -> Manifest | None:
    """List the checkpoint if all its parts are present; return it if this call announces it."""
    paths = [part_path(part.name, number, part.of) for number in range(part.of)]
    there = {found.path for found in store.files(f"{PARTS}/{part.name}")}
    if not there.issuperset(paths):
        return None
    try:
        manifest = merge([read_part(store.get(path), store.where(path)) for path in paths], store.where(PARTS))
    except SnapshotMissing:
        # Another member has published it meanwhile, and removed the parts.
        manifest = read_manifest(store.get(manifest_path(part.name)), store.where(manifest_path(part.name)))
    else:
        _check_chunks(store, manifest)
        store.put(manifest_path(part.name), seal(manifest))
    # Two members may get here at once, with the same manifest. Only one of them removes the first part.
    announces = store.remove_one(paths[0])
    store.remove(there)
    return manifest if announces else None


def _check_chunks(store: Store, manifest: Manifest) -> None:
    """Raise SnapshotMissing unless all chunks are present, including those of members that have been idle since."""
    there = {found.path: found.size for found in store.files(CHUNKS)}
    for ref in manifest.refs:
        if there.get(chunk_path(ref.hash)) != ref.size:
            file = store.where(chunk_path(ref.hash))
            raise SnapshotMissing(f"checkpoint {manifest.name} cannot be listed: {file} is missing or incomplete", file)


def in_parallel(store: Store, call: Callable[[T], None], items: Iterable[T]) -> None:
    """Make calls on as many threads as suit the store; raise the first error."""
    with ThreadPoolExecutor(store.parallel, "craft-checkpoint", initializer=lower_priority) as pool:
        calls = [pool.submit(call, item) for item in items]
        try:
            for each in calls:
                each.result()
        finally:
            pool.shutdown(cancel_futures=True)


class CheckpointEvents:
    """Makes events and passes them on; errors of the receiver are logged."""

    def __init__(self, worker_id: str, on_event: Callable[[AnyNote], None]) -> None:
        self._worker_id = worker_id
        self._on_event = on_event

    def written(self, manifest: Manifest, url: str, seconds: float) -> None:
        self._tell(
            CheckpointWritten(
                name=manifest.name,
                branch=manifest.branch,
                step=manifest.step,
                url=url,
                tag=manifest.tag,
                total_bytes=manifest.total_bytes,
                new_bytes=manifest.new_bytes,
                # By the wall clock, which may have been set back meanwhile.
                seconds=max(0.0, seconds),
            )
        )

    def failed(self, name: str, step: int, error: Exception, tries: int, retry_s: float | None) -> None:
        logger.warning("a share of checkpoint %s was not written: %s", name, error)
        text = str(error) or repr(error)
        self._tell(
            CheckpointFailed(worker_id=self._worker_id, name=name, step=step, error=text, tries=tries, retry_s=retry_s)
        )

    def _tell(self, event: AnyNote) -> None:
        try:
            self._on_event(event)
        except Exception:
            logger.exception("event %s could not be delivered", event)
