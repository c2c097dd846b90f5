"""Preempt a host on SIGTERM or when a file appears: ask the lighthouse to drain its workers.

In a job of one host, all workers take a checkpoint and leave; in a larger one those of this host leave, and the others
go on. The request is repeated with every report, so that a restarted lighthouse knows of it, too.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

from craft.agent.host.relay import Relay
from craft.agent.host.worker_pool import WorkerPool
from craft.protocol.messages import PreemptionOrder
from craft.settings.run import RunSettings

logger = logging.getLogger(__name__)

LEAVE_S = 3.0
"""Workers that are told to end have this long before they are killed."""
_LOOK_S = 0.2
_LONGEST_S = 1e6


class HostPreemption:
    """Lives on the agent's event loop."""

    def __init__(self, relay: Relay, pool: WorkerPool, settings: RunSettings, made: Callable[[str], None]) -> None:
        """``made`` is called with a reason when there is room, should no lighthouse say so before."""
        self._relay = relay
        self._pool = pool
        self._settings = settings
        self._made = made
        self._terminated = False
        self._leaving: asyncio.Task[None] | None = None

    def on_sigterm(self) -> bool:
        """Return whether the workers end in order now; if not, as on the second signal, they are to end at once."""
        first, self._terminated = not self._terminated, True
        if first and self._is_part():
            self._drain("its agent got SIGTERM")
        elif first and self._settings.lighthouse is None and self._can_save():
            self._preempt("SIGTERM", None)
        else:
            return False
        return True

    async def watch(self, file: PreemptFile, give_up: Callable[[str], None]) -> None:
        """Make room when the file appears; ``give_up`` is called with a reason if there is nothing to wait for."""
        limit_s = await file.appeared()
        reason = f"the file {file.path} appeared"
        if self._can_save():
            self._preempt(reason, limit_s)
        elif self._is_part():
            self._drain(reason)
        else:
            give_up(f"{reason}, and the job takes no checkpoints")

    def _is_part(self) -> bool:
        """Whether others go on when this host is told to end: then its workers leave with nothing lost."""
        return self._settings.lighthouse is not None and bool(self._pool.living)

    def _can_save(self) -> bool:
        """Whether there is something to wait for: the job takes checkpoints, and does not end by itself just now."""
        directive = self._relay.directive
        if not self._settings.handles_preemption:
            return False
        if directive is not None and (directive.stopping or directive.winding_down is not None):
            return False
        # While the workers are starting, none has reported that yet.
        return self._settings.checkpoints is not None or any(
            report.checkpoints for report in self._relay.report.workers
        )

    def _drain(self, reason: str) -> None:
        if self._leaving is not None:
            return
        limit_s = self._settings.drain_limit_s
        self._pool.close()
        # Nothing is started here any more: no other host waits for it.
        self._relay.say(draining=reason, drain_deadline_s=limit_s, exhausted=reason)

        async def leave() -> None:
            if not await self._pool.wait(limit_s + LEAVE_S):
                logger.warning("some workers did not leave within %g s", limit_s)
            by = "by SIGTERM" if self._terminated else f"({reason})"
            self._made(f"preempted {by}: its workers left the job")

        self._leaving = asyncio.create_task(leave())

    def _preempt(self, reason: str, limit_s: float | None) -> None:
        limit_s = self._settings.drain_limit_s if limit_s is None else limit_s
        self._relay.say(preempting=PreemptionOrder(reason=reason, deadline=time.time() + limit_s))
        # The lighthouse ends the job at the deadline, unless there is none.
        late = f"preempted ({reason}): no lighthouse ended the job until the deadline"
        asyncio.get_running_loop().call_later(limit_s + LEAVE_S, self._made, late)


class PreemptFile:
    """A file that tells the job to make room when it appears, or is written anew.

    One that is there when this is made is what the job made room for the last time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._old = _mark(path)

    async def appeared(self) -> float | None:
        """Wait for it; returns the number of seconds in it, if there is one."""
        before = self._old
        while True:
            # In a thread: the file may be on a network, which may not answer.
            mark = await asyncio.to_thread(_mark, self.path)
            # Twice the same: the writer may not be done.
            if mark is not None and mark != self._old and mark == before:
                return await asyncio.to_thread(_seconds, self.path)
            before = mark
            await asyncio.sleep(_LOOK_S)


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _seconds(path: Path) -> float | None:
    try:
        seconds = float(path.read_text(errors="replace")[:100])
    except (OSError, ValueError):
        return None
    return min(max(seconds, 0.0), _LONGEST_S) if math.isfinite(seconds) else None
