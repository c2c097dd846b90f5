"""What the threads of a guest are in: whether it computes, waits for others, or is paused, for the watchdog to see.

Any thread may say so. It also knows who does not come out of an exchange: what shuts the connections of another package's group
down frees whoever waits there, as a rule. One that stays holds up everybody who counts on it, and its process ends instead.
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
"""Of the time, spent on a processor: a process that does more than that computes, and does not wait."""


class BlockedTracker:
    """Exchanges and pauses, as they begin and end."""

    def __init__(self, activity: ActivityPage) -> None:
        self._activity = activity
        # Guards what follows.
        self._change = threading.Condition()
        self._exchanges = 0
        self._pauses = 0
        self._pause = ExitStack()
        self._over = False
        self._outs = 0
        """How many times this worker has come out of all exchanges, or paused in one."""

    def exchange_began(self) -> None:
        with self._change:
            self._exchanges += 1
            if self._exchanges == 1:
                self._show()

    def exchange_ended(self) -> None:
        with self._change:
            self._exchanges -= 1
            if self._exchanges == 0:
                self._come_out()
                self._show()

    @contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        with self._change:
            self._pauses += 1
            if self._pauses == 1:
                self._pause.enter_context(self._activity.paused(reason))
                self._come_out()
        try:
            yield
        finally:
            with self._change:
                self._pauses -= 1
                # Several threads may pause, and the first one to is not the last one to go on.
                if self._pauses == 0:
                    self._pause.close()
                    self._show()

    def stepped(self, committed: int) -> None:
        """So many steps are committed by now."""
        self._activity.committed()
        with self._change:
            self._show(committed)

    def end(self) -> None:
        """There are no more steps."""
        with self._change:
            self._over = True
            self._pause.close()
            self._come_out()
            self._activity.now(Phase.ENDING)

    def free_or_end(self, limit_s: float) -> None:
        """Whoever is in an exchange now comes out of it within ``limit_s``, or this process ends. Returns at once."""
        with self._change:
            if self._exchanges and not self._pauses and not self._over:
                waiting = threading.Thread(
                    target=self._await_out, args=(self._outs, limit_s), name="craft-freed", daemon=True
                )
                waiting.start()

    def _await_out(self, outs: int, limit_s: float) -> None:
        computes = True
        while computes:
            spent_s, deadline = time.process_time(), time.monotonic() + limit_s
            with self._change:
                if self._change.wait_for(lambda: self._outs > outs, deadline - time.monotonic()):
                    return
            # A long backward is within an exchange, too, under some frameworks.
            computes = time.process_time() - spent_s > _BUSY_SHARE * limit_s
        logger.critical(
            "what this worker waits in was aborted, and for %g s it has not come out of it: it ends with exit code %d, "
            "for its agent to start another one in its place",
            limit_s, EXIT_NOT_FREED,
        )  # fmt: skip
        os._exit(EXIT_NOT_FREED)

    def _come_out(self) -> None:
        self._outs += 1
        self._change.notify_all()

    def _show(self, step: int | None = None) -> None:
        if not self._pauses and not self._over:
            self._activity.now(Phase.EXCHANGING if self._exchanges else Phase.COMPUTING, step)
