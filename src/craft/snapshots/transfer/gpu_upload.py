"""Frames that arrive for tensors on a device: received into a little pinned memory, and copied on from there.

Enters: the number of connections. Leaves: slots, each with room for one frame, which ``receive.py`` has filled from a socket and
then emptied onto the device, on a stream beside everything else. So a state comes down at the speed of the network, and the
memory of the host never has all of it.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence

import torch

from craft.snapshots.state.device_copy import stream_of
from craft.snapshots.state.raw_memory import carve, room, view_of

_SLOTS = 6
"""For each connection: some are received, some checked, some on their way to the device."""

Piece = tuple[torch.Tensor, int, int]
"""The bytes of a tensor, and which of them, from and to."""


class Slot:
    """Room for a frame."""

    def __init__(self, memory: torch.Tensor, stream: torch.cuda.Stream, free: queue.SimpleQueue[Slot]) -> None:
        self._memory = memory
        self._stream = stream
        self._free = free
        # Blocking: who waits sleeps, instead of keeping a core busy.
        self._emptied = torch.cuda.Event(blocking=True)
        self.view = view_of(memory)

    def wait(self) -> None:
        """Wait until what it held before is on the device."""
        self._emptied.synchronize()

    def put(self, pieces: Sequence[Piece]) -> None:
        """Bring its bytes to where they belong, one piece after the other, and let somebody else have it then."""
        filled = 0
        with torch.cuda.stream(self._stream):
            for target, begin, end in pieces:
                target[begin:end].copy_(self._memory[filled : filled + end - begin], non_blocking=target.is_cuda)
                filled += end - begin
            self._emptied.record()
        self._free.put(self)

    def drop(self) -> None:
        """Its bytes are of no use."""
        self._free.put(self)


class Upload:
    """Slots for so many connections. Made once everything is allocated that bytes are brought to."""

    def __init__(self, device: torch.device, connections: int, frame_bytes: int) -> None:
        self._stream = stream_of(device)
        # Memory that comes new may have been another's, whose last kernels are still under way.
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
        """Room for the next frame of a connection; waits until there is some."""
        slot = self._free[connection].get()
        slot.wait()
        return slot

    def finish(self) -> None:
        """Return once everything is where it belongs."""
        self._stream.synchronize()
