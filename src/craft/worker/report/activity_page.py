"""Says what this worker's main thread is doing, into a file in memory that its agent reads whenever it likes.

Called by the job and its loops at every change of phase, several times per microbatch. It takes no lock and makes no
system call. ``craft.wire.activity`` has the format. Without a path (outside of ``craft run``) nothing is written.
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

_KEPT = 0.98
"""Of the longest duration, this much is left after each shorter one: half after 34, an eighth after 100."""


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
        """How long the main thread was in each phase so far, the current one not counted."""
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
        """The main thread enters ``phase``; the one before it is completed. ``step`` stays as it was unless it is given."""
        since = monotonic()
        before, spent = self._phase, since - self._since
        self.spent_s[before] += spent
        if step is not None:
            self._step = step
        self._phase, self._since = phase, since
        self._microbatch = NONE if microbatch is None else microbatch
        if self._map is None:
            return
        place = LONGEST_WORD + before
        longest = self._doubles[place] * _KEPT
        self._doubles[place] = spent if spent > longest else longest
        sequence = self._sequence = self._sequence + 1
        SLOT.pack_into(self._map, SLOT_OFFSETS[sequence & 1], since, phase, self._step, self._microbatch, self._commits)
        # Last: until here a reader finds the phase before, whole.
        self._words[SEQUENCE_WORD] = sequence

    def committed(self) -> None:
        """A step was committed; the next ``now`` says so."""
        self._commits += 1

    @contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        """Within it the main thread is never overdue. Afterwards it is in the phase that it was in, which begins anew."""
        phase, step, microbatch, outer = self._phase, self._step, self._microbatch, self._reason
        self._pause(reason, step)
        try:
            yield
        finally:
            if phase is Phase.PAUSED:
                self._pause(outer, step)
            else:
                self.now(phase, step, None if microbatch == NONE else microbatch)

    def _pause(self, reason: str, step: int) -> None:
        self._reason = reason
        if self._map is not None:
            room = REASON.stop - REASON.start
            # Cut between characters, not within one.
            text = reason.encode()[:room].decode(errors="ignore").encode()
            self._map[REASON] = text.ljust(room, b"\0")
        self.now(Phase.PAUSED, step)

    def beat(self) -> None:
        """Another thread of this process runs: nobody holds the GIL. Called by the thread that reports to the agent."""
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
            # Written, not just made longer: where there is no room for it, that must show here and not as a SIGBUS later.
            os.write(fd, bytes(SIZE))
            return mmap.mmap(fd, SIZE)
        finally:
            os.close(fd)
    except OSError as error:
        logger.warning("cannot say what this worker is doing (%s): if it hangs, nobody will notice", error)
        return None
