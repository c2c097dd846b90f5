"""Slow a process down by stopping and continuing it many times a second, as a CPU quota would."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import TracebackType


class CpuThrottle:
    """A context manager within which the process ``pid`` runs only ``running_s`` of every ``stopped_s + running_s``.

    Keep ``stopped_s`` well below the limit for stopped workers (``stop_limit_s``), and below a step: a stopped worker takes part
    in no exchange either.
    """

    def __init__(self, pid: int, stopped_s: float = 0.03, running_s: float = 0.006) -> None:
        self._pid = pid
        self._stopped_s = stopped_s
        self._running_s = running_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._pulse, name="craft-pulses", daemon=True)

    def __enter__(self) -> CpuThrottle:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def _pulse(self) -> None:
        # The process may end meanwhile.
        with contextlib.suppress(ProcessLookupError):
            owed_s = self._stopped_s
            while not self._over.is_set():
                began = time.monotonic()
                os.kill(self._pid, signal.SIGSTOP)
                self._over.wait(owed_s)
                stopped = time.monotonic()
                os.kill(self._pid, signal.SIGCONT)
                self._over.wait(self._running_s)
                # On a busy machine both last longer than requested: their ratio counts.
                ran_s = time.monotonic() - stopped
                owed_s = max(0.0, owed_s - (stopped - began) + ran_s * self._stopped_s / self._running_s)
