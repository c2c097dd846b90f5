"""Read single tensors of a checkpoint, or some of their rows: only chunks that hold a part of them, each checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from craft.snapshots.checkpoint.catalog import chunk_pieces, fetch_chunk
from craft.snapshots.state.index import TensorEntry, entry_bytes
from craft.snapshots.state.raw_memory import DTYPES, view_of
from craft.snapshots.store.manifest import Manifest, Ref
from craft.snapshots.store.store import Store


class _ByteRange(NamedTuple):
    """A range of the bytes of an entry, and its location."""

    begin: int
    end: int
    chunk: Ref
    first: int
    """First byte in the chunk."""


class EntryReader:
    """The tensors of one checkpoint, or of one position of a sharded one, by the numbers of their entries."""

    def __init__(
        self, stores: Sequence[Store], manifest: Manifest, entries: Sequence[TensorEntry], shares: Sequence[int] = ()
    ) -> None:
        self._entries = entries
        self._stores = stores
        self._name = manifest.name
        self._pieces: list[list[_ByteRange]] = [[] for _ in entries]
        self._last: tuple[str, memoryview] = ("", memoryview(b""))
        """The chunk that was read last: small tensors share one."""
        for ref, pieces in chunk_pieces(manifest, entries, shares):
            first = 0
            for index, begin, end in pieces:
                self._pieces[index].append(_ByteRange(begin, end, ref, first))
                first += end - begin

    def location(self, number: int) -> list[tuple[str, int, int]]:
        """Return where the bytes of an entry are: entries with the same location are equal."""
        return [(each.chunk.hash, each.first, each.end - each.begin) for each in self._pieces[number]]

    def read(self, number: int, pool: ThreadPoolExecutor) -> torch.Tensor:
        """Return a tensor with the strides that it had."""
        entry = self._entries[number]
        flat = self.rows(number, 0, math.prod(entry.shape[:1]), pool)
        return flat.view(-1).as_strided(entry.shape, entry.stride)

    def box(self, number: int, begins: Sequence[int], sizes: Sequence[int], pool: ThreadPoolExecutor) -> torch.Tensor:
        """Return a box of a tensor."""
        entry = self._entries[number]
        if not entry.shape or not _is_row_major(entry):
            found, first = self.read(number, pool), 0
        else:
            found, first = self.rows(number, begins[0], begins[0] + sizes[0], pool), begins[0]
        for axis, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
            found = found.narrow(axis, begin if axis else begin - first, size)
        return found

    def rows(self, number: int, first: int, last: int, pool: ThreadPoolExecutor) -> torch.Tensor:
        """Return rows of an entry, along its first axis; its bytes must be in row-major order, or be all of them."""
        entry = self._entries[number]
        shape = (last - first, *entry.shape[1:]) if entry.shape else ()
        tensor = torch.empty(shape, dtype=DTYPES[entry.dtype])
        row_bytes = entry_bytes(entry) // max(1, math.prod(entry.shape[:1]))
        begin, end, memory = first * row_bytes, last * row_bytes, view_of(tensor)
        pieces = [piece for piece in self._pieces[number] if piece.begin < end and piece.end > begin]
        if len(pieces) == 1:
            self._fill(entry, pieces[0], begin, end, memory)
            return tensor
        for call in [pool.submit(self._fill, entry, piece, begin, end, memory) for piece in pieces]:
            call.result()
        return tensor

    def _fill(self, entry: TensorEntry, piece: _ByteRange, begin: int, end: int, memory: memoryview) -> None:
        """Copy the part of a piece between ``begin`` and ``end`` into ``memory``, which begins at ``begin``."""
        low, high = max(begin, piece.begin), min(end, piece.end)
        place = memory[low - begin : high - begin]
        what = f"{entry.name} of checkpoint {self._name}"
        if len(place) == piece.chunk.size:
            # Large tensors are read in place, without a copy.
            fetch_chunk(self._stores, piece.chunk, place, what)
            return
        digest, data = self._last
        if digest != piece.chunk.hash:
            data = memoryview(bytearray(piece.chunk.size))
            fetch_chunk(self._stores, piece.chunk, data, what)
            self._last = (piece.chunk.hash, data)
        first = piece.first + low - piece.begin
        place[:] = data[first : first + high - low]


def _is_row_major(entry: TensorEntry) -> bool:
    return tuple(torch.empty(entry.shape, device="meta").stride()) == entry.stride
