"""The tensors of a training state by name and form, and where their bytes lie in the row of all. No torch.

``serialized.py`` makes headers of them; ``chunking.py`` cuts the row; ``craft checkpoints`` reads them without loading torch.
"""

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
    """One tensor of the state. Its bytes travel in the order in which they lie in memory, which ``stride`` tells."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Outline(msgspec.Struct, frozen=True):
    """What of a header can be read without torch."""

    entries: tuple[TensorEntry, ...]
    total_bytes: int
    shares: tuple[int, ...] = ()
    """How many entries each writer had, where they wrote apart from each other."""


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
    """Return the header in ``data``, which may be anything: raise SnapshotCorrupt unless it is one of this kind."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SnapshotCorrupt(f"not the header of {of}: {error}") from None


def item_bytes(dtype: str) -> int:
    """Size of one element: torch's names say how many bits it has, and what is smaller than a byte takes one."""
    bits = _DIGITS.search(dtype)
    return max(1, int(bits.group()) // 8) if bits else 1


def entry_bytes(entry: TensorEntry) -> int:
    return math.prod(entry.shape) * item_bytes(entry.dtype)


class ByteLayout:
    """Where each tensor's bytes lie in the row of all."""

    def __init__(self, entries: Sequence[TensorEntry]) -> None:
        self._begins = [0, *itertools.accumulate(map(entry_bytes, entries))]
        self.total_bytes = self._begins[-1]

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield (number of the entry, first byte, end) for every tensor that has bytes in this range of the row."""
        index = bisect.bisect_right(self._begins, begin) - 1
        while begin < end:
            until = min(end, self._begins[index + 1])
            if until > begin:
                yield index, begin - self._begins[index], until - self._begins[index]
            begin = until
            index += 1
