"""Write records on a thread, so that a slow disk delays the caller only for a moment.

``submit`` returns when the calls before it are made: a process that is killed leaves all its lines but perhaps the last one.
A write usually takes microseconds. On a disk that stalls it may take minutes, and training must not wait that long.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

logger = logging.getLogger(__name__)

PATIENCE_S = 0.5
"""How long a caller waits for the writes before its own."""
_IMPATIENT_S = 60.0
"""After a slower write, callers do not wait for this long: otherwise every step would wait for a slow disk."""


class BackgroundWriter:
    """Makes calls on a thread, in order. Beyond ``max_waiting`` pending calls, the oldest are dropped."""

    def __init__(self, name: str, max_waiting: int) -> None:
        self._name = name
        self._change = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque(maxlen=max_waiting)
        self._submitted = 0
        self._done = 0
        self._busy_since: float | None = None
        """Since when the thread has had something to do."""
        self._impatient_until = 0.0
        self._thread: threading.Thread | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """Queue ``write``; wait for those before it, up to a moment."""
        if monotonic() >= self._impatient_until and not self.wait(PATIENCE_S):
            self._impatient_until = monotonic() + _IMPATIENT_S
        with self._change:
            if self._busy_since is None:
                self._busy_since = monotonic()
            self._waiting.append(write)
            self._submitted += 1
            self._start()
            self._change.notify_all()

    def wait(self, limit_s: float) -> bool:
        """Wait for all calls submitted so far, up to the limit; return whether they were made."""
        with self._change:
            last = self._submitted
            return self._change.wait_for(lambda: self._done >= last, limit_s)

    def behind_s(self) -> float:
        """Return how long the thread has been busy without a pause; 0 if all is written."""
        with self._change:
            return 0.0 if self._busy_since is None else monotonic() - self._busy_since

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting)
                # Dropped calls count as done, too.
                last = self._submitted - len(self._waiting) + 1
                write = self._waiting.popleft()
            try:
                write()
            except Exception:
                # The edge of the thread: a record is not worth the job.
                logger.exception("a record could not be written")
            with self._change:
                self._done = last
                if not self._waiting:
                    self._busy_since = None
                self._change.notify_all()
