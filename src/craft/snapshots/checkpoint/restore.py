"""Read a checkpoint back: header and tensors for ``serialized.load``, every chunk checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from craft.snapshots.checkpoint.catalog import chunk_pieces, describe, fetch_chunk, fetch_header
from craft.snapshots.state.index import Piece
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
    resharded: bool = False
    """Whether it was divided among workers in another way when it was saved: then bits are not promised to be the same."""


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
    chunks = chunk_pieces(manifest, header.entries)
    tensors = make_room(header, targets(modules or {}), None)
    memory = [view_of(tensor) for tensor in tensors]

    def fill(ref: Ref, pieces: Sequence[Piece]) -> None:
        places = [memory[index][begin:end] for index, begin, end in pieces]
        # Large tensors are read in place, without a copy.
        data = places[0] if len(places) == 1 else memoryview(bytearray(ref.size))
        fetch_chunk(tiers.nearest_first, ref, data, describe(header.entries, pieces, manifest.name))
        if len(places) > 1:
            begin = 0
            for place in places:
                place[:] = data[begin : begin + len(place)]
                begin += len(place)

    with ThreadPoolExecutor(_READERS, "craft-restore") as pool:
        calls = [pool.submit(fill, ref, pieces) for ref, pieces in chunks]
        try:
            for call, ref in zip(calls, manifest.chunks, strict=True):
                call.result()
                if progress is not None:
                    progress(ref.size)
        finally:
            pool.shutdown(cancel_futures=True)
    return Restored(header, tensors, manifest)
