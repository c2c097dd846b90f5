"""The tensors of a training state by name, type and shape, and their positions in the serialized bytes. No torch."""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from craft.protocol.errors import SnapshotCorrupt

T = TypeVar("T")

_DIGITS = re.compile(r"\d{1,4}")


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of the state. Its bytes are in memory order, which ``stride`` describes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Outline(msgspec.Struct, frozen=True):
    """The part of a header that can be read without torch."""

    entries: tuple[TensorEntry, ...]
    total_bytes: int
    shares: tuple[int, ...] = ()
    """Number of entries of each writer, if they wrote separately."""


def read_outline(data: bytes) -> Outline:
    """Return the outline of an encoded header, or raise SnapshotCorrupt."""
    outline = decode_as(Outline, data, "a training state")
    for entry in outline.entries:
        if min(entry.shape, default=0) < 0:
            raise SnapshotCorrupt(f"no tensor has the form that the header gives {entry.name}: {entry}")
    apart = outline.shares and (sum(outline.shares) != len(outline.entries) or min(outline.shares) < 0)
    if apart or ByteLayout(outline.entries).total_bytes != outline.total_bytes:
        raise SnapshotCorrupt("the header of a training state contradicts itself")
    return outline


def decode_as(kind: type[T], data: bytes, of: str) -> T:
    """Return the header of this kind in ``data``, which is untrusted; raise SnapshotCorrupt unless it is one."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SnapshotCorrupt(f"not the header of {of}: {error}") from None


def item_bytes(dtype: str) -> int:
    """Return the size of one element: torch's names contain the bits; smaller ones take a byte."""
    bits = _DIGITS.search(dtype)
    return max(1, int(bits.group()) // 8) if bits else 1


def entry_bytes(entry: TensorEntry) -> int:
    return math.prod(entry.shape) * item_bytes(entry.dtype)


Piece = tuple[int, int, int]
"""The number of an entry, and a range of its bytes."""


class ByteLayout:
    """Positions of the tensors in the serialized bytes."""

    def __init__(self, entries: Sequence[TensorEntry]) -> None:
        self._begins = [0, *itertools.accumulate(map(entry_bytes, entries))]
        self.total_bytes = self._begins[-1]

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """Yield the piece of every tensor with bytes in this range."""
        index = bisect.bisect_right(self._begins, begin) - 1
        while begin < end:
            until = min(end, self._begins[index + 1])
            if until > begin:
                yield index, begin - self._begins[index], until - self._begins[index]
            begin = until
            index += 1

    def pieces_in(self, ranges: Sequence[tuple[int, int]]) -> list[Piece]:
        """Return the same for several ranges, in order."""
        return [piece for begin, end in ranges for piece in self.pieces(begin, end)]
