"""The workers of one host: starts them, and replacements, through the fork server.

Every worker has a *place*, a number on this host, which its replacement takes over; ids are never reused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from craft.agent.linux.forkserver import Ended, Fork
from craft.agent.watchdog.watchdog import Watchdog
from craft.decide.job.restart_backoff import AT_ONCE_S, Restarts, worker_ended
from craft.protocol.messages import Directive
from craft.settings.run import RunSettings
from craft.settings.rundir import RunDir
from craft.settings.worker import multiprocessing_folder

logger = logging.getLogger(__name__)

_FORK_AGAIN_S = 1.0
_ADVICE = (
    "End other processes of this user, raise its limit (ulimit -u) or that of the container (pids.max), or free memory"
)


class WorkerPool:
    """Lives on the agent's event loop."""

    def __init__(
        self,
        settings: RunSettings,
        run_dir: RunDir,
        sockets: Path,
        state_key: str,
        watchdog: Watchdog,
        on_exhausted: Callable[[str], None],
        carried_bytes: Callable[[], int],
        *,
        first_number: int = 0,
        world_size: int | None = None,
    ) -> None:
        """Ids are counted from ``first_number``; ``world_size`` is that of the whole job, where it has several hosts."""
        self._settings = settings
        self._run_dir = run_dir
        self._sockets = sockets
        self._state_key = state_key
        self._watchdog = watchdog
        self._on_exhausted = on_exhausted
        self._carried_bytes = carried_bytes
        self._world_size = world_size
        self._writer: asyncio.StreamWriter | None = None
        self._queued: list[tuple[int, bool]] = []
        """(place, late) of workers to be started once there is a fork server."""
        self.started: list[str] = []
        """Ids of all workers that were ever asked for, in that order."""
        self._places: dict[str, int] = {}
        self._next = first_number
        self._restarts = Restarts()
        self._living: dict[str, int] = {}
        self._awaited: dict[str, Fork] = {}
        """Asked for, and neither forked nor ended yet."""
        self._unforked: dict[str, asyncio.Task[None]] = {}
        """Those of them for whom the system gave no process yet, and what asks again."""
        self._starting: set[asyncio.Task[None]] = set()
        self._due = 0
        """How many of these start at once, in the place of one that had done its work."""
        self._vacant: dict[str, int] = {}
        """Places of lost workers that are filled only if the lighthouse says so."""
        self._directive: Directive | None = None
        self._closed = False
        self.all_ended = asyncio.Event()
        # Nothing to wait for: an agent that starts after the end of the job starts no worker.
        self.all_ended.set()

    @property
    def ended_ids(self) -> frozenset[str]:
        """Those of ``started`` whose processes are gone."""
        return frozenset(self.started) - self._living.keys() - self._awaited.keys()

    @property
    def living(self) -> frozenset[str]:
        return frozenset(self._living)

    @property
    def may_start(self) -> bool:
        """Whether workers are still to be started: the first ones, or others in the place of lost ones."""
        return not self._closed and self._restarts.exhausted is None and self._settings.max_restarts > 0

    def starting(self, joined: Collection[str]) -> int:
        """How many workers are on their way: started, or to be started at once, and not among those that have joined.

        Not those that are tried again only after a while, since others died young.
        """
        asked = (self._living.keys() | self._awaited) - set(joined)
        return len(asked) + (0 if self._closed else len(self._queued) + self._due)

    def resume(self, writer: asyncio.StreamWriter) -> None:
        """A fork server is ready: it gets what is to be forked from now on, and what was to be meanwhile."""
        self._writer = writer
        queued, self._queued = self._queued, []
        for place, late in queued:
            self._start(place, late=late)

    def pause(self) -> dict[str, int | None]:
        """Start no worker until there is another fork server: this one ended.

        Returns all of its workers, with their process ids; None where it is unknown whether it was forked.
        """
        self._writer = None
        return {**dict.fromkeys(sorted(self._awaited)), **self._living}

    def begin(self, *, late: bool) -> None:
        """Start all workers of this host, and its spares; ``late``: to a job on its way."""
        if self._settings.max_restarts == 0:
            self._give_up("--max-restarts is 0")
        for place in range(self._settings.workers + self._settings.spares):
            self._start(place, late=late or place >= self._settings.workers)

    def _start(self, place: int, *, late: bool) -> None:
        if self._closed:
            return
        if self._writer is None:
            self._queued.append((place, late))
            return
        request = self._request(place, late=late)
        self._places[request.worker_id] = place
        self._awaited[request.worker_id] = request
        self.all_ended.clear()
        self._writer.write(msgspec.json.encode(request) + b"\n")

    def _request(self, place: int, *, late: bool) -> Fork:
        worker_id = f"{self._settings.worker_prefix}{self._next}"
        self._next += 1
        self.started.append(worker_id)
        try:
            # Not what is above it: a run directory that was removed does not come back half.
            self._run_dir.worker(worker_id).mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            # Its files are records: it trains without them.
            logger.error("there is no folder for the files of %s: %s", worker_id, error)
        worker = self._settings.worker_settings(
            worker_id,
            place,
            socket=str(self._sockets / "agent"),
            run_dir=self._run_dir.path,
            activity=self._activity(worker_id),
            state_key=self._state_key,
            late=late,
            carried_bytes=self._carried_bytes() if late else 0,
        )
        environment = {
            "LOCAL_RANK": str(place),
            "LOCAL_WORLD_SIZE": str(self._settings.workers),
            "WORLD_SIZE": str(self._world_size or self._settings.workers),
            "OMP_NUM_THREADS": str(self._settings.threads),
            **worker.to_environment(),
        }
        if self._world_size is None:
            # In a job of several hosts ranks are given out when all have come: job.rank knows.
            environment["RANK"] = str(place)
        return Fork(
            worker_id=worker_id,
            script=self._settings.script,
            arguments=self._settings.arguments,
            as_module=self._settings.as_module,
            environment=environment,
            log=str(self._run_dir.log(worker_id)),
        )

    def adopt(self, place: int, pid: int, *, late: bool) -> tuple[str, dict[str, str]]:
        """Take on a process that somebody else started; returns its id, and what it is to know."""
        request = self._request(place, late=late)
        self._places[request.worker_id] = place
        self.all_ended.clear()
        self.forked(request.worker_id, pid)
        return request.worker_id, {
            name: text for name, text in request.environment.items() if name.startswith("CRAFT_")
        }

    def _activity(self, worker_id: str) -> Path:
        return self._sockets / f"{worker_id}.activity"

    def not_forked(self, worker_id: str, why: str) -> None:
        """The system gave no process for a worker: ask again, until it does."""
        if self._closed:
            self._forget(worker_id)
            return
        if not self._unforked:
            logger.error("%s cannot be started: %s. It is tried again every second. %s", worker_id, why, _ADVICE)
        self._unforked[worker_id] = asyncio.get_running_loop().create_task(self._fork_again(worker_id))

    async def _fork_again(self, worker_id: str) -> None:
        await asyncio.sleep(_FORK_AGAIN_S)
        if self._writer is not None and worker_id in self._awaited:
            self._writer.write(msgspec.json.encode(self._awaited[worker_id]) + b"\n")

    def _forget(self, worker_id: str) -> None:
        """A worker that never began is not waited for any more."""
        self._awaited.pop(worker_id, None)
        self._places.pop(worker_id, None)
        self._look_for_end()

    def forked(self, worker_id: str, pid: int) -> None:
        self._awaited.pop(worker_id, None)
        if self._unforked.pop(worker_id, None) is not None:
            logger.warning("%s was started at last", worker_id)
        self._living[worker_id] = pid
        log, stacks = self._run_dir.log(worker_id), self._run_dir.stacks(worker_id)
        self._watchdog.add(worker_id, pid, self._activity(worker_id), stacks, log)

    def ended(self, message: Ended, *, worked: bool, waited: bool, replace: bool) -> None:
        """A worker's process is no more; ``replace``: whether another one is to take its place."""
        self._living.pop(message.worker_id, None)
        self._awaited.pop(message.worker_id, None)
        if (again := self._unforked.pop(message.worker_id, None)) is not None:
            again.cancel()
        self._watchdog.remove(message.worker_id)
        self._activity(message.worker_id).unlink(missing_ok=True)
        shutil.rmtree(multiprocessing_folder(self._activity(message.worker_id)), ignore_errors=True)
        place = self._places.pop(message.worker_id)
        if replace and not self._closed:
            self._replace(message.worker_id, place, worked=worked, waited=waited)
        self._look_for_end()

    def _look_for_end(self) -> None:
        if not self._living and not self._awaited:
            self.all_ended.set()

    def _replace(self, worker_id: str, place: int, *, worked: bool, waited: bool) -> None:
        before, limit = self._restarts.exhausted, self._settings.max_restarts
        self._restarts, delay_s = worker_ended(self._restarts, worked=worked, waited=waited, max_restarts=limit)
        if delay_s is not None:
            loop = asyncio.get_running_loop()
            self._due += delay_s <= AT_ONCE_S
            task = loop.create_task(self._start_later(delay_s, worker_id, place))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)
        elif before is None and self._restarts.exhausted is not None:
            self._give_up(self._restarts.exhausted)

    async def _start_later(self, delay_s: float, worker_id: str, place: int) -> None:
        await asyncio.sleep(delay_s)
        self._due -= delay_s <= AT_ONCE_S
        self._vacant[worker_id] = place
        self._fill()

    def directed(self, directive: Directive) -> None:
        """The lighthouse said something: perhaps that somebody is to be started after all."""
        self._directive = directive
        self._fill()

    def _fill(self) -> None:
        for worker_id, place in list(self._vacant.items()):
            if self._settings.on_loss != "auto" or _wanted(self._directive, worker_id):
                del self._vacant[worker_id]
                self._start(place, late=True)

    def _give_up(self, reason: str) -> None:
        logger.warning("no more workers are started in the place of lost ones: %s", reason)
        self._on_exhausted(reason)

    def close(self) -> None:
        """Start nobody any more."""
        self._closed = True
        for task in self._starting:
            task.cancel()
        for worker_id, again in self._unforked.items():
            # Of one that was asked for again just now, the fork server will say what came of it.
            if again.cancel():
                self._forget(worker_id)

    def signal(self, worker_id: str, number: signal.Signals) -> None:
        """Send a signal to a worker that lives."""
        pid = self._living.get(worker_id)
        if pid is None:
            return
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return

    async def wait(self, limit_s: float) -> bool:
        """Wait until all have ended, but not for longer than this; returns whether they have."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.all_ended.wait(), limit_s)
        return self.all_ended.is_set()

    async def end(self, limit_s: float) -> None:
        """Ask all workers to end, and after a while do not ask."""
        self.close()
        for worker_id in self.living:
            self.signal(worker_id, signal.SIGTERM)
        if not await self.wait(limit_s):
            for worker_id in self.living:
                self.signal(worker_id, signal.SIGKILL)


def _wanted(directive: Directive | None, worker_id: str) -> bool:
    """Whether the lighthouse knows of this loss, and wants somebody in its place."""
    if directive is None or not directive.replacing:
        return False
    made = (each for each in (directive.generation, directive.upcoming) if each is not None)
    return all(each.rank_of(worker_id) is None for each in made)
