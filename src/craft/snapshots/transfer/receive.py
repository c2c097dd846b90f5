"""Receive a state into memory as its stripes arrive, on several threads; ``fetch.py`` owns one for each transfer."""

from __future__ import annotations

import itertools
import mmap
import threading
from collections.abc import Iterator, Mapping

import torch

from craft.protocol.errors import BitsDiffer, SnapshotCorrupt
from craft.snapshots.state.device_copy import own_device, take_at_once
from craft.snapshots.state.index import ByteLayout, TensorEntry, entry_bytes
from craft.snapshots.state.raw_memory import DTYPES, carve, memory_of, room, view_of
from craft.snapshots.state.reserved_memory import Reserve
from craft.snapshots.state.serialized import Header, decode_header, flat_form, stripe_of, targets
from craft.snapshots.transfer.gpu_upload import Piece, Slot, Upload
from craft.snapshots.transfer.protocol import lane_of

_ALIGN = 64
"""As torch aligns its memory, so that kernels take the same path."""


class Frame:
    """Memory that receives one frame, and what is done with it once it is verified."""

    def __init__(self, pieces: list[memoryview]) -> None:
        self.pieces = pieces

    def put(self) -> None:
        """Bring a verified frame to its destination, unless it is there already."""

    def drop(self) -> None:
        """Discard it."""


class _Passing(Frame):
    """A frame that goes on to a device."""

    def __init__(self, slot: Slot, pieces: list[Piece]) -> None:
        super().__init__([slot.view[: sum(end - begin for _, begin, end in pieces)]])
        self._slot = slot
        self._places = pieces

    def put(self) -> None:
        self._slot.put(self._places)

    def drop(self) -> None:
        self._slot.drop()


class StateReceiver:
    """Memory for a state that arrives in ``of`` stripes, each over ``lanes`` connections."""

    header: Header
    tensors: list[torch.Tensor]

    def __init__(
        self, of: int, modules: Mapping[str, torch.nn.Module], reserve: Reserve | None = None, lanes: int = 1
    ) -> None:
        self._of = of
        self._lanes = lanes
        self._reserve = reserve
        self._modules = modules
        self._upload: Upload | None = None
        # Guards the allocation of what follows, by the first stripe whose header arrives.
        self._lock = threading.Lock()
        self._data: bytes | None = None

    def open(self, data: bytes, frame_bytes: int, address: str) -> None:
        """Take a header. The first one allocates memory; the others must be equal to it."""
        with self._lock:
            if self._data is None:
                self._frame_bytes = frame_bytes
                self._make_room(decode_header(data))
                self._data = data
            elif data != self._data or frame_bytes != self._frame_bytes:
                other = itertools.zip_longest(flat_form(self.header), flat_form(decode_header(data)))
                name = next((str((mine or theirs)[0]) for mine, theirs in other if mine != theirs), "its conditions")
                raise BitsDiffer(
                    f"the donors hold different training states, first in {name}: {address} and another one"
                )

    def _make_room(self, header: Header) -> None:
        self.header = header
        own = targets(self._modules, devices=True)
        device = own_device(own.values())
        self.tensors = make_room(header, own, self._reserve, device)
        self._layout = ByteLayout(header.entries)
        self._bytes = [memory_of(tensor) for tensor in self.tensors]
        if device is not None and any(tensor.is_cuda for tensor in self.tensors):
            self._upload = Upload(device, self._of * self._lanes, self._frame_bytes)
        else:
            self._memory = [view_of(tensor) for tensor in self.tensors]

    def frames(self, part: int, lane: int, size: int, address: str) -> Iterator[Frame]:
        """Yield the memory for each frame of a lane of a stripe."""
        begin, end = stripe_of(self.header.total_bytes, part, self._of)
        if size != end - begin:
            raise SnapshotCorrupt(f"{address} offers {size} bytes where its stripe has {end - begin}", address)
        for first in lane_of(size, self._frame_bytes, lane, self._lanes):
            pieces = self._layout.pieces(begin + first, min(end, begin + first + self._frame_bytes))
            if self._upload is None:
                yield Frame([self._memory[index][start:stop] for index, start, stop in pieces])
            else:
                slot = self._upload.slot(part * self._lanes + lane)
                yield _Passing(slot, [(self._bytes[index], start, stop) for index, start, stop in pieces])

    def finish(self) -> None:
        """Return once nothing is under way."""
        if self._upload is not None:
            self._upload.finish()


def make_room(
    header: Header, own: Mapping[TensorEntry, torch.Tensor], reserve: Reserve | None, device: torch.device | None = None
) -> list[torch.Tensor]:
    """Return a tensor for every entry: that of a module where it fits, otherwise one in new memory.

    The tensors of one registered object share memory in large pages, so that it is freed as a whole when the object has copied
    them. Reserved memory is one piece for all. Entries from a device get memory of ``device``, each tensor separately, as the
    object would have allocated it.
    """
    found: list[torch.Tensor | None] = [
        own.get(entry) if index < header.module_entries else None for index, entry in enumerate(header.entries)
    ]
    if device is not None:
        wanted = [index for index in header.on_device if found[index] is None]
        take_at_once(device, sum(entry_bytes(header.entries[index]) for index in wanted))
        for index in wanted:
            entry = header.entries[index]
            found[index] = torch.empty_strided(entry.shape, entry.stride, dtype=DTYPES[entry.dtype], device=device)

    def owner(index: int) -> tuple[bool, str]:
        return index < header.module_entries, header.entries[index].name.partition(".")[0]

    indices = range(len(header.entries))
    tensors: list[torch.Tensor] = []
    for group in [indices] if reserve is not None else [list(each) for _, each in itertools.groupby(indices, owner)]:
        entries = [(header.entries[index], found[index]) for index in group]
        sizes = [0 if target is not None else _aligned(entry) for entry, target in entries]
        memory = room(sum(sizes)) if reserve is None else reserve.take(sum(sizes))
        begins = itertools.accumulate(sizes, initial=0)
        for (entry, target), begin in zip(entries, begins, strict=False):
            tensors.append(target if target is not None else _tensor(memory, begin, entry))
    return tensors


def _aligned(entry: TensorEntry) -> int:
    return -(-entry_bytes(entry) // _ALIGN) * _ALIGN


def _tensor(memory: mmap.mmap, begin: int, entry: TensorEntry) -> torch.Tensor:
    flat = carve(memory, begin, entry_bytes(entry)).view(DTYPES[entry.dtype])
    return flat.as_strided(entry.shape, entry.stride)
