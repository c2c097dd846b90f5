"""End workers that are cut off from the lighthouse and the group, if others can train on.

Training does not need the lighthouse. So a worker ends only if its exchange broke, or if it waits in the exchange for long
and cannot reach another member: an unnoticed network cut looks just like a slow step.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time

from craft.agent.host.relay import Relay
from craft.agent.host.worker_pool import WorkerPool
from craft.agent.linux.host_access import HostAccess
from craft.agent.watchdog.watchdog import Watchdog

logger = logging.getLogger(__name__)

_ASK_AGAIN_S = 5.0


class WorkerLease:
    """Checks the workers' lease: ``look`` is called several times a second. Lives on the agent's event loop."""

    def __init__(self, lease_s: float, relay: Relay, pool: WorkerPool, watchdog: Watchdog, outside: HostAccess) -> None:
        self._lease_s = lease_s
        self._relay = relay
        self._pool = pool
        self._watchdog = watchdog
        self._outside = outside
        self._asked: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._said = False
        """Whether the wait is already logged for this absence of the lighthouse."""

    def look(self) -> None:
        if self._relay.silent_s() <= self._lease_s:
            self._said = False
            return
        if not self._others_have_state():
            return
        waiting_s = self._watchdog.waiting_s()
        for worker_id, report in self._relay.reports().items():
            if worker_id not in self._pool.living:
                continue
            if report.broken is not None:
                self._end(worker_id, "its exchange broke")
            elif waiting_s.get(worker_id, 0.0) > self._lease_s and self._is_due(worker_id):
                task = asyncio.create_task(self._ask(worker_id))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _others_have_state(self) -> bool:
        """Return whether workers of other hosts are known to have the training state; else those here must not end."""
        directive = self._relay.directive
        here = self._relay.reports().keys()
        found = directive is not None and any(each not in here for each in directive.holders)
        if not found and not self._said:
            self._said = True
            logger.warning(
                "no lighthouse is in reach: workers of this host have the only training state, and wait for it"
            )
        return found

    def _is_due(self, worker_id: str) -> bool:
        now = time.monotonic()
        if now - self._asked.get(worker_id, -_ASK_AGAIN_S) < _ASK_AGAIN_S:
            return False
        self._asked[worker_id] = now
        return True

    async def _ask(self, worker_id: str) -> None:
        directive = self._relay.directive
        if directive is None or directive.generation is None:
            return
        missing = await asyncio.to_thread(self._outside.unreachable, directive.generation, worker_id)
        if missing and self._relay.silent_s() > self._lease_s:
            self._end(worker_id, f"it waits in the exchange, and {', '.join(missing)} cannot be reached")

    def _end(self, worker_id: str, why: str) -> None:
        logger.warning("%s ends: no lighthouse is in reach, and %s", worker_id, why)
        self._pool.signal(worker_id, signal.SIGKILL)
