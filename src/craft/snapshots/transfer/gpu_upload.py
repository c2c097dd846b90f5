"""Receive frames for device tensors into a little pinned memory, and copy them on from there, on a separate stream.

So a state arrives at the speed of the network, and host memory never holds all of it.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence

import torch

from craft.snapshots.state.device_copy import stream_of
from craft.snapshots.state.raw_memory import carve, room, view_of

_SLOTS = 6
"""Per connection: some are received, some checked, some on their way to the device."""

Piece = tuple[torch.Tensor, int, int]
"""The bytes of a tensor, and a range of them."""


class Slot:
    """Memory for a frame."""

    def __init__(self, memory: torch.Tensor, stream: torch.cuda.Stream, free: queue.SimpleQueue[Slot]) -> None:
        self._memory = memory
        self._stream = stream
        self._free = free
        # Blocking: a waiting thread sleeps instead of occupying a core.
        self._emptied = torch.cuda.Event(blocking=True)
        self.view = view_of(memory)

    def wait(self) -> None:
        """Wait until its previous content is on the device."""
        self._emptied.synchronize()

    def put(self, pieces: Sequence[Piece]) -> None:
        """Copy its bytes to their tensors, piece by piece, then free the slot."""
        filled = 0
        with torch.cuda.stream(self._stream):
            for target, begin, end in pieces:
                target[begin:end].copy_(self._memory[filled : filled + end - begin], non_blocking=target.is_cuda)
                filled += end - begin
            self._emptied.record()
        self._free.put(self)

    def drop(self) -> None:
        """Discard its bytes."""
        self._free.put(self)


class Upload:
    """Slots for so many connections. Make it once all destinations are allocated."""

    def __init__(self, device: torch.device, connections: int, frame_bytes: int) -> None:
        self._stream = stream_of(device)
        # Freshly allocated memory may still be in use by the kernels of its previous owner.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        memory = room(connections * _SLOTS * frame_bytes)
        with torch.cuda.device(device):
            memory.pin()
        self._free: list[queue.SimpleQueue[Slot]] = []
        for connection in range(connections):
            free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
            for number in range(connection * _SLOTS, (connection + 1) * _SLOTS):
                free.put(Slot(carve(memory, number * frame_bytes, frame_bytes), self._stream, free))
            self._free.append(free)

    def slot(self, connection: int) -> Slot:
        """Return memory for the next frame of a connection; wait until there is some."""
        slot = self._free[connection].get()
        slot.wait()
        return slot

    def finish(self) -> None:
        """Return once everything is on the device."""
        self._stream.synchronize()
