"""Track whether a guest computes, waits for others or is paused, and show it to the watchdog.

Any thread may call it. It also ends a process that stays blocked after an abort: closing the connections of another package's
group usually frees the threads that wait on them. A thread that stays blocked would hold up every other member.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from craft.groups.group import EXIT_NOT_FREED
from craft.protocol.values.activity import Phase
from craft.worker.report.activity_page import ActivityPage

logger = logging.getLogger(__name__)

_BUSY_SHARE = 0.1
"""Share of CPU time above which a process computes rather than waits."""


class BlockedTracker:
    """Counts the exchanges and pauses of all threads."""

    def __init__(self, activity: ActivityPage) -> None:
        self._activity = activity
        # Guards everything below.
        self._change = threading.Condition()
        self._exchanges = 0
        self._pauses = 0
        self._pause = ExitStack()
        self._over = False
        self._returns = 0
        """How many times this worker has left all exchanges, or paused in one."""

    def exchange_began(self) -> None:
        with self._change:
            self._exchanges += 1
            if self._exchanges == 1:
                self._show()

    def exchange_ended(self) -> None:
        with self._change:
            self._exchanges -= 1
            if self._exchanges == 0:
                self._mark_returned()
                self._show()

    @contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        with self._change:
            self._pauses += 1
            if self._pauses == 1:
                self._pause.enter_context(self._activity.paused(reason))
                self._mark_returned()
        try:
            yield
        finally:
            with self._change:
                self._pauses -= 1
                # Several threads may pause; the last one to continue ends the pause.
                if self._pauses == 0:
                    self._pause.close()
                    self._show()

    def stepped(self, committed: int) -> None:
        """Show that ``committed`` steps are committed."""
        self._activity.committed()
        with self._change:
            self._show(committed)

    def end(self) -> None:
        """Show that there are no more steps."""
        with self._change:
            self._over = True
            self._pause.close()
            self._mark_returned()
            self._activity.now(Phase.ENDING)

    def free_or_end(self, limit_s: float) -> None:
        """End this process if a thread is still in its exchange after ``limit_s``. Returns at once."""
        with self._change:
            if self._exchanges and not self._pauses and not self._over:
                waiting = threading.Thread(
                    target=self._await_return, args=(self._returns, limit_s), name="craft-freed", daemon=True
                )
                waiting.start()

    def _await_return(self, returns: int, limit_s: float) -> None:
        computes = True
        while computes:
            spent_s, deadline = time.process_time(), time.monotonic() + limit_s
            with self._change:
                if self._change.wait_for(lambda: self._returns > returns, deadline - time.monotonic()):
                    return
            # Under some frameworks a long backward is within an exchange, too.
            computes = time.process_time() - spent_s > _BUSY_SHARE * limit_s
        logger.critical(
            "collective still blocked %g s after abort; exiting %d for replacement", limit_s, EXIT_NOT_FREED
        )
        os._exit(EXIT_NOT_FREED)

    def _mark_returned(self) -> None:
        self._returns += 1
        self._change.notify_all()

    def _show(self, step: int | None = None) -> None:
        if not self._pauses and not self._over:
            self._activity.now(Phase.EXCHANGING if self._exchanges else Phase.COMPUTING, step)
