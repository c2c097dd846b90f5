"""Where the bytes of a state come down as its stripes arrive, each on a thread of its own.

Enters: headers, which must all be the same, and the modules that are to be filled. Leaves: memory to receive each frame into,
and at the end the tensors. ``fetch.py`` owns one for each transfer.
"""

from __future__ import annotations

import itertools
import mmap
import threading
from collections.abc import Iterator, Mapping

import torch

from craft.protocol.errors import BitsDiffer, SnapshotCorrupt
from craft.snapshots.entries import Entry, Layout, entry_bytes
from craft.snapshots.line import FRAME_BYTES
from craft.snapshots.memory import DTYPES, carve, room, view_of
from craft.snapshots.portable import Header, decode_header, flat_form, stripe_of, targets
from craft.snapshots.reserve import Reserve

_ALIGN = 64
"""As torch aligns its own memory, so that kernels take the same path."""


class Landing:
    """Room for a state that arrives in ``of`` stripes."""

    header: Header
    tensors: list[torch.Tensor]

    def __init__(self, of: int, modules: Mapping[str, torch.nn.Module], reserve: Reserve | None = None) -> None:
        self._of = of
        self._reserve = reserve
        self._modules = modules
        # Guards the making of what follows: the first stripe whose header is here does it.
        self._lock = threading.Lock()
        self._data: bytes | None = None

    def open(self, data: bytes, address: str) -> None:
        """A header is here. The first one makes room; the others must be equal to it."""
        with self._lock:
            if self._data is None:
                self.header = decode_header(data)
                self.tensors = make_room(self.header, targets(self._modules), self._reserve)
                self._layout = Layout(self.header.entries)
                self._memory = [view_of(tensor) for tensor in self.tensors]
                self._data = data
            elif data != self._data:
                other = itertools.zip_longest(flat_form(self.header), flat_form(decode_header(data)))
                name = next((str((mine or theirs)[0]) for mine, theirs in other if mine != theirs), "its conditions")
                raise BitsDiffer(
                    f"the donors hold different training states, first in {name}: {address} and another one"
                )

    def frames(self, part: int, size: int, address: str) -> Iterator[list[memoryview]]:
        """Yield, for each frame of a stripe, the pieces of memory that it fills."""
        begin, end = stripe_of(self.header.total_bytes, part, self._of)
        if size != end - begin:
            raise SnapshotCorrupt(f"{address} offers {size} bytes where its stripe has {end - begin}", address)
        for first in range(begin, end, FRAME_BYTES):
            pieces = self._layout.pieces(first, min(end, first + FRAME_BYTES))
            yield [self._memory[index][start:stop] for index, start, stop in pieces]


def make_room(header: Header, own: Mapping[Entry, torch.Tensor], reserve: Reserve | None) -> list[torch.Tensor]:
    """Return a tensor for every entry: that of a module where it fits, else one in new memory.

    The tensors of one registered object share their memory, in large pages. So it is given back as a whole when the object
    has copied them and lets go. What was set aside is one piece for all.
    """
    tensors: list[torch.Tensor] = []
    numbered = enumerate(header.entries)
    if reserve is not None:
        return _in_one_piece(header, own, reserve)
    for _, group in itertools.groupby(numbered, key=lambda each: (each[0] < header.module_entries, _owner(each[1]))):
        entries = [(entry, own.get(entry) if index < header.module_entries else None) for index, entry in group]
        sizes = [0 if target is not None else _aligned(entry) for entry, target in entries]
        memory = room(sum(sizes))
        begins = itertools.accumulate(sizes, initial=0)
        for (entry, target), begin in zip(entries, begins, strict=False):
            tensors.append(target if target is not None else _tensor(memory, begin, entry))
    return tensors


def _in_one_piece(header: Header, own: Mapping[Entry, torch.Tensor], reserve: Reserve) -> list[torch.Tensor]:
    found = [own.get(entry) if index < header.module_entries else None for index, entry in enumerate(header.entries)]
    memory = reserve.take(
        sum(_aligned(entry) for entry, target in zip(header.entries, found, strict=True) if target is None)
    )
    tensors, begin = [], 0
    for entry, target in zip(header.entries, found, strict=True):
        tensors.append(target if target is not None else _tensor(memory, begin, entry))
        begin += 0 if target is not None else _aligned(entry)
    return tensors


def _aligned(entry: Entry) -> int:
    return -(-entry_bytes(entry) // _ALIGN) * _ALIGN


def _owner(entry: Entry) -> str:
    return entry.name.partition(".")[0]


def _tensor(memory: mmap.mmap, begin: int, entry: Entry) -> torch.Tensor:
    flat = carve(memory, begin, entry_bytes(entry)).view(DTYPES[entry.dtype])
    return flat.as_strided(entry.shape, entry.stride)
