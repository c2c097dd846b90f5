"""Read manifests and chunks from the stores of a job, check them, and select checkpoints by step, name or tag. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blake3 import blake3

from craft.protocol.errors import ConfigError, SnapshotCorrupt, SnapshotError, SnapshotMissing
from craft.protocol.events import CheckpointRejected
from craft.snapshots.checkpoint.chunking import cut
from craft.snapshots.state.index import ByteLayout, Piece, TensorEntry
from craft.snapshots.store.manifest import (
    MANIFESTS,
    Manifest,
    Ref,
    chunk_path,
    manifest_path,
    place_of_name,
    read_manifest,
)
from craft.snapshots.store.store import Store
from craft.snapshots.store.tiers import Tiers

_MAX_LOOKS = 100
_SHOWN = 8


def candidates(tiers: Tiers, on_rejected: Callable[[CheckpointRejected], None] | None = None) -> list[Manifest]:
    """Return what is listed in any store, newest (branch, step) first.

    An unreadable manifest is reported to ``on_rejected`` and left out. Raises SnapshotError if a store does not answer.
    """
    found: dict[str, Manifest] = {}
    for store in tiers.nearest_first:
        for manifest in manifests(store, on_rejected):
            found[manifest.name] = manifest
    return sorted(found.values(), key=lambda each: each.order, reverse=True)


def manifests(store: Store, on_rejected: Callable[[CheckpointRejected], None] | None = None) -> list[Manifest]:
    """Return what is listed in one store, oldest first; unreadable manifests are reported and left out."""
    for _ in range(_MAX_LOOKS):
        found, rejected, is_stale = _look(store)
        # Some were collected while they were read, so that there are newer ones: look again.
        if not is_stale:
            break
    if on_rejected is not None:
        for event in rejected:
            on_rejected(event)
    return sorted(found, key=lambda each: each.order)


def _look(store: Store) -> tuple[list[Manifest], list[CheckpointRejected], bool]:
    """Return the manifests, those that cannot be used, and whether one was removed meanwhile."""
    found, rejected, is_stale = [], [], False
    for file in store.files(MANIFESTS):
        try:
            found.append(read_manifest(store.get(file.path), store.where(file.path)))
        except SnapshotMissing:
            is_stale = True
        except SnapshotCorrupt as error:
            name = file.path.removeprefix(f"{MANIFESTS}/").removesuffix(".json")
            _, step = place_of_name(name) or (0, 0)
            rejected.append(CheckpointRejected(name=name, step=step, url=store.url, reason=str(error)))
    return found, rejected, is_stale


def is_listed(tiers: Tiers, name: str) -> bool:
    """Return whether a checkpoint is still listed: a running job removes old ones."""
    for store in tiers.nearest_first:
        try:
            store.get(manifest_path(name))
        except SnapshotMissing:
            continue
        return True
    return False


def fetch_chunk(stores: Sequence[Store], ref: Ref, out: memoryview, what: str) -> None:
    """Fill ``out`` with a chunk from the first store where its hash is right; ``what`` names its owner in errors."""
    errors: list[SnapshotError] = []
    for store in stores:
        try:
            store.read(ref, out)
        except SnapshotError as error:
            errors.append(error)
            continue
        if blake3(out).hexdigest() == ref.hash:
            return
        file = store.where(chunk_path(ref.hash))
        errors.append(SnapshotCorrupt(f"{file} is damaged: its bytes do not have the hash in its name", file))
    reasons = "; ".join(map(str, errors))
    missing = all(isinstance(error, SnapshotMissing) for error in errors)
    raise (SnapshotMissing if missing else SnapshotCorrupt)(
        f"{what} cannot be read: no good copy of chunk {ref.hash}: {reasons}", errors[-1].address
    )


def describe(entries: Sequence[TensorEntry], pieces: Sequence[Piece], checkpoint: str) -> str:
    """Name the tensors of a chunk in an error."""
    names = [entries[index].name for index, _, _ in pieces]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more} of checkpoint {checkpoint}"


def fetch_header(tiers: Tiers, manifest: Manifest) -> bytes:
    """Return the encoded header of a checkpoint."""
    out = bytearray(manifest.header.size)
    fetch_chunk(tiers.nearest_first, manifest.header, memoryview(out), f"the header of checkpoint {manifest.name}")
    return bytes(out)


def chunk_pieces(
    manifest: Manifest, entries: Sequence[TensorEntry], shares: Sequence[int] = ()
) -> list[tuple[Ref, list[Piece]]]:
    """Return each chunk of a checkpoint with the pieces of tensors in it.

    Raises SnapshotCorrupt if the chunks of the manifest are not those that its header asks for.
    """
    layout, chunks = ByteLayout(entries), cut(entries, shares)
    if [ref.size for ref in manifest.chunks] != [chunk.size for chunk in chunks]:
        raise SnapshotCorrupt(
            f"checkpoint {manifest.name} contradicts itself: its chunks do not have the sizes that its header asks for"
        )
    return [(ref, layout.pieces_in(chunk.ranges)) for ref, chunk in zip(manifest.chunks, chunks, strict=True)]


def select_all(found: Sequence[Manifest], url: str, which: Sequence[str]) -> list[Manifest]:
    """Return all of ``found`` that have one of these steps, names or tags; each of them must match."""
    for each in which:
        select(found, url, each)
    return [each for each in found if {str(each.step), each.name, each.tag} & set(which)]


def select(found: Sequence[Manifest], url: str, which: str | int | None = None) -> Manifest:
    """Return the newest of ``found`` with this step, name or tag, or the newest of all. They are sorted, newest first."""
    if not found:
        raise ConfigError(f"{url} holds no checkpoints: give the URL that the job writes to ('--checkpoints')")
    if which is None:
        return found[0]
    for manifest in found:
        if str(which) in (str(manifest.step), manifest.name, manifest.tag):
            return manifest
    steps = ", ".join(dict.fromkeys(str(manifest.step) for manifest in found[:_SHOWN]))
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise ConfigError(f"{url} holds no checkpoint {which}: it has those of steps {steps}{more}; give a step or a name")


def names_one(text: str) -> bool:
    """Return whether a word on a command line is the step or name of a checkpoint, rather than a URL."""
    return text.isdigit() or place_of_name(text) is not None
