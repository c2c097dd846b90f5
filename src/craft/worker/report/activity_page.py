"""Write what the main thread is doing into a memory-mapped file that the agent reads at any time.

The job and its loops call it at every change of phase, several times per microbatch. It takes no lock and makes no system
call. ``craft.wire.activity`` has the format. Without a path (outside of ``craft run``) nothing is written.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from craft.protocol.values.activity import Phase
from craft.wire.activity import (
    BEAT_WORD,
    LONGEST_WORD,
    MAGIC,
    NEVER,
    NONE,
    REASON,
    SEQUENCE_WORD,
    SIZE,
    SLOT,
    SLOT_OFFSETS,
)

logger = logging.getLogger(__name__)

_DECAY = 0.98
"""Decay of the longest duration with each shorter one: half after 34, an eighth after 100."""


class ActivityPage:
    """Belongs to the main thread, except for ``beat``. Begins in the phase ``starting``."""

    def __init__(self, path: Path | None) -> None:
        self._map: mmap.mmap | None = _map(path) if path is not None else None
        self._commits = 0
        self._phase = Phase.STARTING
        self._step = NONE
        self._microbatch = NONE
        self._since = monotonic()
        self.spent_s = [0.0] * len(Phase)
        """Seconds that the main thread has spent in each phase, without the current one."""
        self._sequence = 0
        self._reason = ""
        if self._map is not None:
            self._words = memoryview(self._map).cast("Q")
            self._doubles = memoryview(self._map).cast("d")
            for index in (BEAT_WORD, *range(LONGEST_WORD, LONGEST_WORD + len(Phase))):
                self._doubles[index] = NEVER
            SLOT.pack_into(self._map, SLOT_OFFSETS[0], self._since, self._phase, NONE, NONE, 0)
            self._words[0] = MAGIC

    def now(self, phase: Phase, step: int | None = None, microbatch: int | None = None) -> None:
        """Enter ``phase`` and complete the one before. ``step`` stays as it was unless it is given."""
        since = monotonic()
        before, spent = self._phase, since - self._since
        self.spent_s[before] += spent
        if step is not None:
            self._step = step
        self._phase, self._since = phase, since
        self._microbatch = NONE if microbatch is None else microbatch
        if self._map is None:
            return
        index = LONGEST_WORD + before
        longest = self._doubles[index] * _DECAY
        self._doubles[index] = spent if spent > longest else longest
        sequence = self._sequence = self._sequence + 1
        SLOT.pack_into(self._map, SLOT_OFFSETS[sequence & 1], since, phase, self._step, self._microbatch, self._commits)
        # Last: until here a reader finds the phase before, complete.
        self._words[SEQUENCE_WORD] = sequence

    def committed(self) -> None:
        """Count a committed step; the next ``now`` writes it."""
        self._commits += 1

    @contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        """Suspend the watchdog for the block. Afterwards the phase before begins anew."""
        phase, step, microbatch, outer = self._phase, self._step, self._microbatch, self._reason
        self._pause(reason, step)
        try:
            yield
        finally:
            if phase is Phase.PAUSED:
                self._pause(outer, step)
            else:
                self.now(phase, step, None if microbatch == NONE else microbatch)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for other workers in the block, as in an exchange. Afterwards the phase before begins anew."""
        phase, step, microbatch = self._phase, self._step, self._microbatch
        self.now(Phase.EXCHANGING, step)
        try:
            yield
        finally:
            self.now(phase, step, None if microbatch == NONE else microbatch)

    def _pause(self, reason: str, step: int) -> None:
        self._reason = reason
        if self._map is not None:
            size = REASON.stop - REASON.start
            # Cut between characters, not within one.
            text = reason.encode()[:size].decode(errors="ignore").encode()
            self._map[REASON] = text.ljust(size, b"\0")
        self.now(Phase.PAUSED, step)

    def beat(self) -> None:
        """Write a heartbeat: no thread holds the GIL. Called by the thread that reports to the agent."""
        if self._map is not None:
            self._doubles[BEAT_WORD] = monotonic()

    def close(self) -> None:
        """Write no more; the file stays."""
        if self._map is not None:
            self._words.release()
            self._doubles.release()
            self._map.close()
            self._map = None


def _map(path: Path) -> mmap.mmap | None:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            # Written, not only extended: a full disk must fail here and not as a SIGBUS later.
            os.write(fd, bytes(SIZE))
            return mmap.mmap(fd, SIZE)
        finally:
            os.close(fd)
    except OSError as error:
        logger.warning("cannot write the activity page (%s): a hang of this worker will not be detected", error)
        return None
