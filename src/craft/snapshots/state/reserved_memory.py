"""Memory reserved before it is needed: for the next stripe of a donor, or for the state that a joiner expects.

The first touch of memory can cost more than the write itself. A thread pays that cost early.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from craft.snapshots.state.device_copy import PinnedMemory, uses_devices
from craft.snapshots.state.raw_memory import carve, room

_SHARE = 16
"""The largest part of the host's free memory that one process reserves long before it needs it."""


def can_wait_there(size: int) -> bool:
    """Return whether this host can spare ``size`` bytes for a reservation."""
    return size * _SHARE <= _available_bytes()


def _available_bytes() -> int:
    """Return the memory that is free without swapping; 0 if unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0


class Reserve:
    """Memory that a thread touches before it is needed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory: PinnedMemory | None = room(size)
        self._thread = threading.Thread(target=self._touch, name="craft-reserve", daemon=True)
        self._thread.start()

    def _touch(self) -> None:
        if self._memory is not None:
            carve(self._memory, 0, self.size).zero_()
            if uses_devices():
                self._memory.pin()

    @property
    def is_there(self) -> bool:
        return not self._thread.is_alive()

    def take(self, size: int) -> PinnedMemory:
        """Return memory for ``size`` bytes: the reserved one if it suffices; the same again on the next call."""
        if size > self.size or self._memory is None:
            return room(size)
        # Otherwise the thread would erase what is copied there meanwhile.
        self._thread.join()
        return self._memory

    def release(self) -> None:
        """Free it."""
        self._thread.join()
        self._memory = None
