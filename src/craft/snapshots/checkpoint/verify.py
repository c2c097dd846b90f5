"""Check checkpoints without loading them: that every byte is there, and how two of them differ. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec
from blake3 import blake3

from craft.protocol.errors import SnapshotError, SnapshotMissing
from craft.snapshots.checkpoint.catalog import chunk_pieces, describe, fetch_chunk, fetch_header
from craft.snapshots.state.index import Piece, TensorEntry, decode_as, entry_bytes, read_outline
from craft.snapshots.store.manifest import Manifest, Ref
from craft.snapshots.store.tiers import Tiers


def verify(tiers: Tiers, manifest: Manifest, progress: Callable[[int], None] | None = None) -> list[str]:
    """Read every byte of a checkpoint; return its problems, in sentences. ``progress`` receives byte counts."""
    parts = manifest.by_position()
    if len(parts) == 1:
        return _verify(tiers, manifest, progress)
    return [
        f"position {position}: {problem}"
        for position, part in enumerate(parts)
        for problem in _verify(tiers, part, progress)
    ]


def _verify(tiers: Tiers, manifest: Manifest, progress: Callable[[int], None] | None) -> list[str]:
    """Do the same for one position."""
    try:
        outline = read_outline(fetch_header(tiers, manifest))
        chunks = chunk_pieces(manifest, outline.entries, outline.shares)
    except SnapshotError as error:
        return [str(error)]

    def look(chunk: tuple[Ref, list[Piece]]) -> list[str]:
        return _problems(tiers, chunk[0], describe(outline.entries, chunk[1], manifest.name))

    problems: list[str] = []
    with ThreadPoolExecutor(max(store.parallel for store in tiers.nearest_first), "craft-verify") as pool:
        for ref, found in zip(manifest.chunks, pool.map(look, chunks), strict=True):
            problems += found
            if progress is not None:
                progress(ref.size)
    return problems


def _problems(tiers: Tiers, ref: Ref, what: str) -> list[str]:
    """Return the problems of a chunk in any store. One that is missing from a store is no problem if another has it."""
    out = memoryview(bytearray(ref.size))
    missing, wrong, good = [], [], 0
    for store in tiers.nearest_first:
        try:
            fetch_chunk((store,), ref, out, what)
            good += 1
        except SnapshotMissing as error:
            missing.append(str(error))
        except SnapshotError as error:
            wrong.append(str(error))
    if good:
        return [f"{each}; another store has it" for each in wrong]
    return [*wrong, *missing]


class TensorChange(NamedTuple):
    """A tensor that differs between two checkpoints."""

    name: str
    before: TensorEntry | None
    """None: only the second has it."""
    after: TensorEntry | None
    size: int
    """In bytes, of the larger one."""


class Difference(NamedTuple):
    """How two checkpoints differ."""

    tensors: tuple[TensorChange, ...]
    same_tensors: int
    values: tuple[str, ...]
    """Registered objects whose plain values differ, and ``conditions``; of a sharded model, with their position."""
    shared_bytes: int
    """Bytes stored once for both."""
    bytes_before: int
    bytes_after: int


class _Values(msgspec.Struct):
    skeleton: dict[str, msgspec.Raw] = {}
    conditions: bytes = b""


def diff(tiers: Tiers, before: Manifest, after: Manifest) -> Difference:
    """Compare two checkpoints. Reads only chunks of small tensors; raises SnapshotError if one cannot be read."""
    both = [[_Side(tiers, part) for part in manifest.by_position()] for manifest in (before, after)]
    old, new = (
        {
            _at(name, position, sides): (entry, print_)
            for position, side in enumerate(sides)
            for name, entry, print_ in side.prints()
        }
        for sides in both
    )
    changes = []
    for name in dict.fromkeys([*old, *new]):
        if old.get(name) != new.get(name):
            entries = [side[name][0] if name in side else None for side in (old, new)]
            size = max(entry_bytes(entry) for entry in entries if entry is not None)
            changes.append(TensorChange(name, entries[0], entries[1], size))
    known = {ref.hash: ref.size for ref in before.chunks}
    return Difference(
        tensors=tuple(changes),
        same_tensors=len({*old, *new}) - len(changes),
        values=tuple(
            _at(name, position, both[0])
            for position, (one, other) in enumerate(zip(*both, strict=False))
            for name in _unlike(one.values, other.values)
        ),
        shared_bytes=sum(known[each] for each in {ref.hash for ref in after.chunks} if each in known),
        bytes_before=before.total_bytes,
        bytes_after=after.total_bytes,
    )


def _at(name: str, position: int, sides: Sequence[object]) -> str:
    """Return a name with the position that it belongs to, if there are several."""
    return f"{name} at position {position}" if len(sides) > 1 else name


def _unlike(old: _Values, new: _Values) -> tuple[str, ...]:
    names = dict.fromkeys([*old.skeleton, *new.skeleton])
    found = [name for name in names if bytes(old.skeleton.get(name, b"")) != bytes(new.skeleton.get(name, b""))]
    return (*found, *(["conditions"] if old.conditions != new.conditions else []))


class _Side:
    """One of the two checkpoints."""

    def __init__(self, tiers: Tiers, manifest: Manifest) -> None:
        header = fetch_header(tiers, manifest)
        self._tiers = tiers
        self._manifest = manifest
        outline = read_outline(header)
        self._entries = outline.entries
        self.values = decode_as(_Values, header, "a training state")
        self._chunks = chunk_pieces(manifest, outline.entries, outline.shares)

    def prints(self) -> Iterator[tuple[str, TensorEntry, list[str]]]:
        """Yield (name, form, hashes of its bytes) for every tensor."""
        prints: list[list[str]] = [[] for _ in self._entries]
        for ref, pieces in self._chunks:
            if len(pieces) == 1:
                prints[pieces[0][0]].append(ref.hash)
                continue
            data = memoryview(bytearray(ref.size))
            fetch_chunk(self._tiers.nearest_first, ref, data, f"small tensors of checkpoint {self._manifest.name}")
            begin = 0
            for index, first, end in pieces:
                prints[index].append(blake3(data[begin : begin + end - first]).hexdigest())
                begin += end - first
        for entry, each in zip(self._entries, prints, strict=True):
            yield entry.name, entry, each
