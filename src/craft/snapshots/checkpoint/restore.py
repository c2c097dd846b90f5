"""Read a checkpoint back: header and tensors for ``serialized.load``, every chunk checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from craft.snapshots.checkpoint.catalog import check_sizes, describe, fetch_chunk, fetch_header
from craft.snapshots.checkpoint.chunking import Chunk, cut
from craft.snapshots.state.index import ByteLayout
from craft.snapshots.state.raw_memory import view_of
from craft.snapshots.state.serialized import Header, decode_header, targets
from craft.snapshots.store.manifest import Manifest, Ref
from craft.snapshots.store.tiers import Tiers
from craft.snapshots.transfer.receive import make_room

_READERS = 8
"""Enough that some wait for the store while others hash."""


class Restored(NamedTuple):
    """A complete state. Tensors are in the order of the header's entries."""

    header: Header
    tensors: list[torch.Tensor]
    manifest: Manifest


def restore(
    tiers: Tiers,
    manifest: Manifest,
    modules: Mapping[str, torch.nn.Module] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Restored:
    """Read a checkpoint, each chunk from the nearest store with a good copy; ``progress`` receives byte counts.

    Parameters and buffers of ``modules`` are read in place: after an error their content is undefined. Raises SnapshotMissing or
    SnapshotCorrupt, which name the chunk, its files and its tensors.
    """
    header = decode_header(fetch_header(tiers, manifest))
    chunks = cut(header.entries)
    check_sizes(manifest, chunks)
    tensors = make_room(header, targets(modules or {}), None)
    landing = _Destination(tiers, manifest, header, tensors)
    with ThreadPoolExecutor(_READERS, "craft-restore") as pool:
        calls = [pool.submit(landing.fill, ref, chunk) for ref, chunk in zip(manifest.chunks, chunks, strict=True)]
        try:
            for call, chunk in zip(calls, chunks, strict=True):
                call.result()
                if progress is not None:
                    progress(chunk.size)
        finally:
            pool.shutdown(cancel_futures=True)
    return Restored(header, tensors, manifest)


class _Destination:
    """Tensors that receive the chunks of a checkpoint, several at a time."""

    def __init__(self, tiers: Tiers, manifest: Manifest, header: Header, tensors: Sequence[torch.Tensor]) -> None:
        self._stores = tiers.nearest_first
        self._name = manifest.name
        self._entries = header.entries
        self._layout = ByteLayout(header.entries)
        self._memory = [view_of(tensor) for tensor in tensors]

    def fill(self, ref: Ref, chunk: Chunk) -> None:
        pieces = self._layout.pieces_in(chunk.ranges)
        places = [self._memory[index][begin:end] for index, begin, end in pieces]
        what = describe([self._entries[index].name for index, _, _ in pieces], self._name)
        if len(places) == 1:
            # Large tensors are read in place, without a copy.
            fetch_chunk(self._stores, ref, places[0], what)
            return
        data = memoryview(bytearray(ref.size))
        fetch_chunk(self._stores, ref, data, what)
        begin = 0
        for place in places:
            place[:] = data[begin : begin + len(place)]
            begin += len(place)
