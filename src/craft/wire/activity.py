"""Format and reader of the page on which a worker's main thread publishes its activity.

``worker/report/activity_page.py`` writes it through a memory map; ``agent/watchdog/watchdog.py`` reads it at any time, also
while the worker holds the GIL or is stopped. 256 bytes in native byte order, since both run on one host:

    word 0       magic number, written last: before that there is nothing to read
    word 1       sequence: the number of phases begun; its parity names the slot that is complete
    word 2       when another Python thread of the worker last ran
    words 3-12   for each phase the longest recent duration; -1 where it was never completed
    words 13-17  slot 0: since, phase, step, microbatch, commits; -1 for no step and no microbatch
    words 18-22  slot 1
    words 24-31  reason for the pause, in UTF-8

The writer fills the unused slot, then changes the sequence: a writer that stops half way leaves the previous phase intact.
A reader that sees the sequence change while it reads tries again.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import tempfile
from pathlib import Path

from craft.protocol.values.activity import Doing, Phase

STACKS_SIGNAL = signal.SIGRTMIN + 8
"""Asks a worker for the stacks of its threads. Scripts and libraries use the first real-time signals, if any."""

SIZE = 256
MAGIC = 0x3154464152435F41
SEQUENCE_WORD = 1
BEAT_WORD = 2
LONGEST_WORD = 3
SLOT = struct.Struct("=dqqqq")
SLOT_OFFSETS = (13 * 8, 18 * 8)
REASON = slice(24 * 8, 32 * 8)
NEVER = -1.0
NONE = -1

_HEAD = struct.Struct(f"=QQd{len(Phase)}d")
_ATTEMPTS = 16


def memory_folder() -> Path:
    """Return the folder for activity pages: in memory, because a write to a page mapped from a busy disk may block."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


class ActivityReader:
    """Reads one file repeatedly, without a system call once it is open. The file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None
        self._words: memoryview[int] | None = None

    def read(self) -> Doing | None:
        """Return the worker's activity; None before its first phase, or if it changes too fast to be read."""
        if self._words is None and not self._open():
            return None
        assert self._words is not None and self._map is not None
        for _ in range(_ATTEMPTS):
            sequence = self._words[SEQUENCE_WORD]
            data = self._map[:]
            if self._words[SEQUENCE_WORD] == sequence:
                return _decode(data, sequence)
        return None

    def _open(self) -> bool:
        try:
            with self._path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)
        except (OSError, ValueError):
            # Does not exist yet, or is still empty.
            return False
        self._words = memoryview(self._map).cast("Q")
        return True

    def close(self) -> None:
        if self._words is not None:
            self._words.release()
            self._words = None
        if self._map is not None:
            self._map.close()
            self._map = None


def _decode(data: bytes, sequence: int) -> Doing | None:
    magic, _, beat, *longest = _HEAD.unpack_from(data)
    since, number, step, microbatch, commits = SLOT.unpack_from(data, SLOT_OFFSETS[sequence & 1])
    if magic != MAGIC or not 0 <= number < len(Phase):
        return None
    phase = Phase(number)
    return Doing(
        phase=phase,
        since=since,
        step=None if step == NONE else step,
        microbatch=None if microbatch == NONE else microbatch,
        # The reason is outside the slots: a read between two pauses may mix the reasons of both.
        reason=data[REASON].rstrip(b"\0").decode(errors="replace") if phase is Phase.PAUSED else "",
        commits=commits,
        changes=sequence,
        longest=tuple(None if value == NEVER else value for value in longest),
        beat=None if beat == NEVER else beat,
    )


def read(path: Path) -> Doing | None:
    """Read a file once."""
    reader = ActivityReader(path)
    try:
        return reader.read()
    finally:
        reader.close()
