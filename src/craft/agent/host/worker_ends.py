"""Handle ended workers: replace and report them; end those that remain after the job."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable

from msgspec.structs import asdict

from craft.agent.host.preemption import LEAVE_S
from craft.agent.host.relay import Relay
from craft.agent.host.worker_pool import WorkerPool
from craft.agent.linux.forkserver import Ended
from craft.agent.watchdog.watchdog import Watchdog
from craft.protocol.messages import Exited, WorkerReport

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_HEAR_OUT_S = 1.0
"""A process forked by an ended worker may hold its connection open for this long."""


class WorkerEnds:
    """Handles the end of each worker once. Lives on the agent's event loop."""

    def __init__(
        self, relay: Relay, pool: WorkerPool, may_replace: Callable[[], bool], done: Callable[[], None]
    ) -> None:
        """``done`` is called after each end is handled."""
        self._relay = relay
        self._pool = pool
        self._may_replace = may_replace
        self._done = done
        self._hearing: set[asyncio.Task[None]] = set()

    def ended(self, message: Ended) -> None:
        """Handle the end of a worker; after exit code 0, first read its last report."""
        if message.exit_code != 0:
            self.take(message)
            return
        # The last report decides what exit code 0 means.
        task = asyncio.create_task(self._hear_out(message))
        self._hearing.add(task)
        task.add_done_callback(self._hearing.discard)

    async def _hear_out(self, message: Ended) -> None:
        await self._relay.hear_out(message.worker_id, _HEAR_OUT_S)
        self.take(message)

    def take(self, message: Ended) -> None:
        """Handle the end of a worker now; ignore a repeated one."""
        if message.worker_id not in self._pool.ended_ids:
            self._take(message)
        self._done()

    def _take(self, message: Ended) -> None:
        report = self._relay.reports().get(message.worker_id)
        self._pool.ended(
            message,
            worked=report is not None and report.step > 0 and not report.behind and not _was_refused(report),
            waited=message.signal == signal.SIGKILL and report is not None and report.joined and not report.generation,
            replace=self._may_replace() and _was_needed(message, report),
        )
        # First: the report of its end must say whether a replacement comes.
        self.count_starting()
        self._relay.ended(Exited(**asdict(message)))

    def count_starting(self) -> None:
        """Report how many workers are starting: a restored job waits for them."""
        joined = [worker_id for worker_id, report in self._relay.reports().items() if report.joined]
        starting = self._pool.starting(joined)
        if starting != self._relay.report.starting:
            self._relay.say(starting=starting)


class RemainingWorkers:
    """After a successful job, ends workers that would not end by themselves soon."""

    def __init__(
        self, pool: WorkerPool, watchdog: Watchdog, has_joined: Callable[[str], bool], *, end_starting: bool = True
    ) -> None:
        """``end_starting``: whether to end workers that have not joined, too."""
        self._pool = pool
        self._watchdog = watchdog
        self._has_joined = has_joined
        self._ends_starting = end_starting
        self._asked: dict[str, float] = {}
        self._stopped: dict[str, float] = {}

    async def run(self) -> None:
        """Check repeatedly, until cancelled."""
        while True:
            if self._ends_starting:
                self._end_starting()
            self._end_stopped()
            await asyncio.sleep(_TICK_S)

    def _end_starting(self) -> None:
        """End workers that have not joined, those forked only now included: the job is over.

        A script may handle SIGTERM, so SIGKILL follows after a while.
        """
        for worker_id in self._pool.living:
            if self._has_joined(worker_id):
                continue
            if worker_id not in self._asked:
                self._asked[worker_id] = time.monotonic()
                self._pool.signal(worker_id, signal.SIGTERM)
            elif time.monotonic() - self._asked[worker_id] > LEAVE_S:
                self._pool.signal(worker_id, signal.SIGKILL)

    def _end_stopped(self) -> None:
        """Kill workers that a signal stopped for a while: the job no longer needs them."""
        now, stopped = time.monotonic(), self._watchdog.stopped() & self._pool.living
        for worker_id in self._stopped.keys() - stopped:
            del self._stopped[worker_id]
        for worker_id in stopped:
            if now - self._stopped.setdefault(worker_id, now) > LEAVE_S:
                logger.warning("%s was stopped by a signal when the job ended: killing it", worker_id)
                self._pool.signal(worker_id, signal.SIGKILL)
                del self._stopped[worker_id]


def _was_needed(message: Ended, report: WorkerReport | None) -> bool:
    """Return whether it ended early: it failed, or exited 0 (as by os._exit) without finishing or leaving on request."""
    if message.exit_code != 0:
        return True
    return report is None or not (report.complete or report.script_ended or report.left)


def _was_refused(report: WorkerReport) -> bool:
    """Return whether a worker was refused; a replacement most likely would be, too."""
    return report.failed is not None and report.failed.refused
