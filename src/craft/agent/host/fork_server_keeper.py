"""Keep a fork server running for the agent, and pass on what it reports."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable

from craft.agent.host.retry import retry
from craft.agent.host.worker_pool import WorkerPool
from craft.agent.linux.fork_server_process import ForkServerProcess, gone
from craft.agent.linux.forkserver import Ended, Forked, NotForked, Ready
from craft.protocol.errors import Unreachable
from craft.settings.run import RunSettings

logger = logging.getLogger(__name__)

_START_S = 60.0
_RETRY_S = 1.0
_MOST_FAILURES = 3
"""The agent gives up after this many fork servers in a row that ended before they were ready."""


class ForkServerKeeper:
    """Runs one fork server at a time, on the agent's event loop; its workers end with it."""

    def __init__(
        self,
        settings: RunSettings,
        pool: WorkerPool,
        *,
        is_over: Callable[[], bool],
        on_ended: Callable[[Ended], None],
        on_lost: Callable[[Ended], None],
    ) -> None:
        """``on_ended`` gets each worker's end; ``on_lost`` gets those of workers that died with their fork server."""
        self._settings = settings
        self._pool = pool
        self._is_over = is_over
        self._on_ended = on_ended
        self._on_lost = on_lost
        self._process: ForkServerProcess | None = None
        self.ready = asyncio.Event()
        """Set once the first fork server is ready to fork."""

    async def run(self) -> None:
        """Start fork servers until the job is over; raise Unreachable if that fails too often."""
        failures = 0
        while failures < _MOST_FAILURES:
            self._process = await self._start()
            failures = 0 if await self._follow(self._process) else failures + 1
            await self._process.end()
            if self._is_over():
                return
            if not self._pool.may_start and not self._pool.started:
                break
            await self._lose_workers()
            if not self._pool.may_start:
                # The lighthouse knows that they ended and decides: other hosts may go on.
                return
        why = "" if failures < _MOST_FAILURES else f", {failures} times in a row before its imports were done"
        raise Unreachable(f"the fork server ended, and its workers with it{why}")

    async def end(self) -> None:
        """End the fork server, and with it its workers."""
        if self._process is not None:
            await self._process.end()

    async def _start(self) -> ForkServerProcess:
        """Start a fork server; retry while the system refuses a process."""

        def log(error: Exception) -> None:
            logger.error("cannot start the fork server: %s; trying again every second", _reason(error))

        try:
            return await retry(
                lambda: ForkServerProcess.start(self._settings),
                OSError,
                limit_s=_START_S,
                every_s=_RETRY_S,
                failed=log,
            )
        except OSError as error:
            raise Unreachable(f"the fork server could not be started for {_START_S:g} s: {_reason(error)}") from None

    async def _follow(self, process: ForkServerProcess) -> bool:
        """Handle the fork server's messages until it ends; return whether it was ever ready."""
        is_ready = False
        async for message in process.messages():
            if isinstance(message, Ready):
                is_ready = True
                self.ready.set()
                self._pool.resume(process.writer)
            elif isinstance(message, Forked):
                self._pool.forked(message.worker_id, message.pid)
            elif isinstance(message, NotForked):
                self._pool.not_forked(message.worker_id, message.why)
            elif isinstance(message, Ended):
                self._on_ended(message)
        return is_ready

    async def _lose_workers(self) -> None:
        """Report the end of all workers: they died with their fork server."""
        pids = self._pool.pause()
        then = "starting another one" if self._pool.may_start else "no more workers are started"
        logger.warning("the fork server ended, and its workers with it: %s", then)
        await gone(pid for pid in pids.values() if pid is not None)
        for worker_id in pids:
            self._on_lost(
                Ended(
                    worker_id=worker_id,
                    exit_code=None,
                    signal=signal.SIGKILL,
                    time=time.time(),
                    why="with the fork server of its host",
                )
            )


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
