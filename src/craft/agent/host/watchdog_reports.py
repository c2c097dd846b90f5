"""Put the watchdog's findings into the agent's reports: activities and overdue workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from craft.agent.host.relay import Relay
from craft.agent.watchdog.watchdog import Suspect, Watchdog
from craft.decide.job.last_copy import STOPPED
from craft.protocol.events import WorkerOverdue


class WatchdogReports:
    """Passes findings to the relay: ``look`` is called ten times a second. Lives on the agent's event loop."""

    def __init__(self, watchdog: Watchdog, relay: Relay, on_stopped: Callable[[str], None]) -> None:
        """``on_stopped`` is called with each worker that a signal stopped."""
        self._watchdog = watchdog
        self._relay = relay
        self._on_stopped = on_stopped
        self._examined: dict[str, str] = {}
        """By suspect, the phase in which it was examined."""
        self._tasks: set[asyncio.Task[None]] = set()

    def look(self) -> None:
        overdue = self._watchdog.look()
        suspects = {suspect.worker_id: suspect for suspect in (*self._watchdog.held_up(), *overdue)}
        doing = {worker_id: doing.phase.word for worker_id, doing in self._watchdog.activities().items()}
        self._relay.doing({**doing, **dict.fromkeys(self._watchdog.stopped(), STOPPED)})
        for worker_id in [each for each in self._examined if each not in suspects]:
            del self._examined[worker_id]
            self._relay.found(worker_id, None)
        for worker_id, suspect in suspects.items():
            if self._examined.get(worker_id) != suspect.overdue.phase:
                self._examined[worker_id] = suspect.overdue.phase
                task = asyncio.create_task(self._examine(suspect))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _examine(self, suspect: Suspect) -> None:
        overdue = suspect.overdue
        stack, detail = "", overdue.words
        if overdue.cause != "waiting":
            hang = await self._watchdog.examine(suspect)
            if hang is None:
                # It made progress meanwhile, or ended.
                self._examined.pop(suspect.worker_id, None)
                return
            stack, detail = hang.stack, hang.sentence
        step = overdue.doing.step if overdue.doing is not None else None
        found = WorkerOverdue(
            worker_id=suspect.worker_id,
            phase=overdue.phase,
            step=step or 0,
            elapsed_s=round(overdue.elapsed_s, 3),
            limit_s=round(overdue.limit_s, 3),
            detail=detail,
            stack=stack,
        )
        self._relay.found(suspect.worker_id, found)
        if overdue.cause == "stopped":
            self._on_stopped(suspect.worker_id)
