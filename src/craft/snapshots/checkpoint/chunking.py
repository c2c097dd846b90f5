"""Divide the bytes of a training state into chunks, and the chunks among the members. Pure, no torch.

The same on every worker and every time, so that unchanged bytes get the same hash again.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from craft.snapshots.state.index import TensorEntry, entry_bytes

CHUNK_BYTES = 4 << 20
"""A file of this size is written about as fast as a large one, and a changed byte costs no more than this."""
LARGE_BYTES = 64 << 10
"""Tensors of at least this size have separate chunks."""
PACK_BYTES = 1 << 20
"""Smaller ones share chunks of up to this size."""


class Chunk(NamedTuple):
    """Ranges of bytes that are stored as one file, in order."""

    ranges: tuple[tuple[int, int], ...]
    size: int


def cut(entries: Sequence[TensorEntry], shares: Sequence[int] = ()) -> tuple[Chunk, ...]:
    """Return the chunks of a state, ordered by their first bytes; together they cover every byte once.

    ``shares``: the number of entries of each writer that does not know the others; each share is divided separately.
    """
    chunks: list[Chunk] = []
    first = begin = 0
    for count in shares or (len(entries),):
        mine = entries[first : first + count]
        chunks += _cut_share(mine, begin)
        begin += sum(map(entry_bytes, mine))
        first += count
    return tuple(chunks)


def _cut_share(entries: Sequence[TensorEntry], begin: int) -> list[Chunk]:
    chunks: list[Chunk] = []
    small: list[tuple[int, int]] = []
    packed = 0
    for entry in entries:
        end = begin + entry_bytes(entry)
        if end - begin >= LARGE_BYTES:
            firsts = range(begin, end, CHUNK_BYTES)
            chunks += [_chunk([(first, min(end, first + CHUNK_BYTES))]) for first in firsts]
        elif end > begin:
            if packed + end - begin > PACK_BYTES:
                chunks.append(_chunk(small))
                small, packed = [], 0
            packed += end - begin
            # Merge neighbours into one range: an optimizer has many tensors of a single number.
            first = small.pop()[0] if small and small[-1][1] == begin else begin
            small.append((first, end))
        begin = end
    if small:
        chunks.append(_chunk(small))
    return sorted(chunks)


def _chunk(ranges: list[tuple[int, int]]) -> Chunk:
    return Chunk(tuple(ranges), sum(end - begin for begin, end in ranges))


def assign(chunks: Sequence[Chunk], of: int) -> list[list[int]]:
    """Return for each of ``of`` members the numbers of the chunks that it writes.

    Each chunk in turn goes to the member with the fewest bytes so far. So every stretch is divided evenly: if half of a state is
    frozen, all members write an equal share of the other half.
    """
    shares: list[list[int]] = [[] for _ in range(of)]
    load = [(0, member) for member in range(of)]
    for number, chunk in enumerate(chunks):
        least, member = load[0]
        shares[member].append(number)
        heapq.heapreplace(load, (least + chunk.size, member))
    return shares
