"""Handle preemption of this host, by SIGTERM or a file: ask the lighthouse to drain its workers.

In a job of one host, all workers take a checkpoint and leave; in a larger one those of this host leave, and the others
go on. Every report repeats the request, so that a restarted lighthouse gets it, too.
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
"""How long workers have to end before they are killed."""
_LOOK_S = 0.2
_LONGEST_S = 1e6


class HostPreemption:
    """Turns SIGTERM and the preempt file into drains or checkpoints. Lives on the agent's event loop."""

    def __init__(self, relay: Relay, pool: WorkerPool, settings: RunSettings, made: Callable[[str], None]) -> None:
        """``made`` is called with a reason once the workers have left, or if no lighthouse ended the job in time."""
        self._relay = relay
        self._pool = pool
        self._settings = settings
        self._made = made
        self._terminated = False
        self._leaving: asyncio.Task[None] | None = None

    def on_sigterm(self) -> bool:
        """Begin an orderly end; return False if workers must end at once instead, as on a second signal."""
        first, self._terminated = not self._terminated, True
        if first and self._is_part():
            self._drain("its agent got SIGTERM")
        elif first and self._settings.lighthouse is None and self._can_save():
            self._preempt("SIGTERM", None)
        else:
            return False
        return True

    async def watch(self, file: PreemptFile, give_up: Callable[[str], None]) -> None:
        """Preempt when the file appears; call ``give_up`` with a reason if an orderly end is not possible."""
        limit_s = await file.appeared()
        reason = f"the file {file.path} appeared"
        if self._can_save():
            self._preempt(reason, limit_s)
        elif self._is_part():
            self._drain(reason)
        else:
            give_up(f"{reason}, and the job takes no checkpoints")

    def _is_part(self) -> bool:
        """Return whether this host is part of a larger job: its workers can leave without loss, and others go on."""
        return self._settings.lighthouse is not None and bool(self._pool.living)

    def _can_save(self) -> bool:
        """Return whether a preemption can save state: the job takes checkpoints and is not ending already."""
        directive = self._relay.directive
        if not self._settings.handles_preemption:
            return False
        if directive is not None and (directive.stopping or directive.winding_down is not None):
            return False
        # Workers that are still starting have not reported that they take checkpoints.
        return self._settings.checkpoints is not None or any(
            report.checkpoints for report in self._relay.report.workers
        )

    def _drain(self, reason: str) -> None:
        if self._leaving is not None:
            return
        limit_s = self._settings.drain_limit_s
        self._pool.close()
        # This host starts no more workers: no other host must wait for one.
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
        # Normally the lighthouse ends the job at the deadline.
        late = f"preempted ({reason}): no lighthouse ended the job until the deadline"
        asyncio.get_running_loop().call_later(limit_s + LEAVE_S, self._made, late)


class PreemptFile:
    """A file that preempts the job when it appears or is rewritten.

    A file that exists already is left from the last preemption, and is ignored.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._old = _mark(path)

    async def appeared(self) -> float | None:
        """Wait for the file; return the number of seconds in it, if any."""
        before = self._old
        while True:
            # In a thread: a network file system may block.
            mark = await asyncio.to_thread(_mark, self.path)
            # Unchanged since the last look: before that, the writer may not be done.
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
