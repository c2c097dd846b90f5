"""Start the workers of one host, and their replacements, through the fork server.

Every worker has a *place*, its number on this host. A replacement takes over the place; ids are never reused. Where the
model is sharded, the place gives the worker's position in its replica.
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
from craft.settings.worker import WorkerSettings, multiprocessing_folder

logger = logging.getLogger(__name__)

_FORK_AGAIN_S = 1.0
_ADVICE = (
    "End other processes of this user, raise its limit (ulimit -u) or that of the container (pids.max), or free memory"
)


class WorkerPool:
    """Knows all workers of this host and replaces lost ones. Lives on the agent's event loop."""

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
        """Ids count from ``first_number``; ``world_size`` is that of the whole job, if it has several hosts."""
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
        """(place, late) of workers to start once a fork server is ready."""
        self.started: list[str] = []
        """Ids of all workers ever requested, in that order."""
        self._places: dict[str, int] = {}
        self._next = first_number
        self._first_position = 0
        self._positions: dict[int, int] = {}
        """Places of spares that were started again at another position than that of their place."""
        self._moves: dict[str, int] = {}
        """Spares that are to end and to be started again at this position."""
        self._restarts = Restarts()
        self._living: dict[str, int] = {}
        self._awaited: dict[str, Fork] = {}
        """Workers that were requested and have neither been forked nor ended."""
        self._unforked: dict[str, asyncio.Task[None]] = {}
        """Those of them that the system refused a process, with the task that retries."""
        self._starting: set[asyncio.Task[None]] = set()
        self._due = 0
        """How many of these start without a backoff."""
        self._vacant: dict[str, int] = {}
        """Places of lost workers that wait to be filled; under ``--on-loss auto`` the lighthouse decides."""
        self._directive: Directive | None = None
        self._closed = False
        self.all_ended = asyncio.Event()
        # Set from the start: an agent that starts after the end of the job starts no worker.
        self.all_ended.set()

    @property
    def ended_ids(self) -> frozenset[str]:
        """Workers of ``started`` whose processes have ended."""
        return frozenset(self.started) - self._living.keys() - self._awaited.keys()

    @property
    def living(self) -> frozenset[str]:
        return frozenset(self._living)

    @property
    def may_start(self) -> bool:
        """Whether this host may still start workers: first ones or replacements."""
        return not self._closed and self._restarts.exhausted is None and self._settings.max_restarts > 0

    def starting(self, joined: Collection[str]) -> int:
        """Return how many workers are started, or start at once, and have not joined.

        Replacements that a backoff delays do not count.
        """
        asked = (self._living.keys() | self._awaited) - set(joined)
        return len(asked) + (0 if self._closed else len(self._queued) + self._due)

    def resume(self, writer: asyncio.StreamWriter) -> None:
        """Send requests to a new fork server from now on, those queued meanwhile first."""
        self._writer = writer
        queued, self._queued = self._queued, []
        for place, late in queued:
            self._start(place, late=late)

    def pause(self) -> dict[str, int | None]:
        """Queue requests until there is another fork server: this one ended.

        Return all of its workers with their process ids; None if it is unknown whether one was forked.
        """
        self._writer = None
        return {**dict.fromkeys(sorted(self._awaited)), **self._living}

    def begin(self, *, late: bool, first_position: int = 0) -> None:
        """Start all workers and spares of this host; ``late``: the job has begun already.

        ``first_position``: that of its first worker, if this host does not hold whole replicas.
        """
        self._first_position = first_position
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
            # Without parents: do not recreate parts of a run directory that was removed.
            self._run_dir.worker(worker_id).mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            # These files are only records: the worker trains without them.
            logger.error("there is no folder for the files of %s: %s", worker_id, error)
        worker = WorkerSettings(
            worker_id=worker_id,
            local_rank=place,
            replica_size=self._settings.workers_per_replica,
            position=self._positions.get(place, (self._first_position + place) % self._settings.workers_per_replica),
            socket=str(self._sockets / "agent"),
            run_dir=self._run_dir.path,
            activity=self._activity(worker_id),
            state_key=self._state_key,
            late=late,
            carried_bytes=self._carried_bytes() if late else 0,
            **self._settings.of_workers,
        )
        environment = {
            "LOCAL_RANK": str(place),
            "LOCAL_WORLD_SIZE": str(self._settings.workers),
            "WORLD_SIZE": str(self._world_size or self._settings.workers),
            "OMP_NUM_THREADS": str(self._settings.threads),
            **worker.to_environment(),
        }
        if self._world_size is None:
            # With several hosts, ranks are assigned once all have joined: see job.rank.
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
        """Adopt a process that another launcher started; return its worker id and its CRAFT environment."""
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
        """Retry a fork that the system refused, until it succeeds."""
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
        """Stop waiting for a worker that was never forked."""
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
        """Remove a worker whose process ended; ``replace``: whether to start a replacement."""
        self._living.pop(message.worker_id, None)
        self._awaited.pop(message.worker_id, None)
        if (again := self._unforked.pop(message.worker_id, None)) is not None:
            again.cancel()
        self._watchdog.remove(message.worker_id)
        self._activity(message.worker_id).unlink(missing_ok=True)
        shutil.rmtree(multiprocessing_folder(self._activity(message.worker_id)), ignore_errors=True)
        place = self._places.pop(message.worker_id)
        if (position := self._moves.pop(message.worker_id, None)) is not None:
            # Not a loss: it does not count as a restart.
            self._positions[place] = position
            self._start(place, late=True)
        elif replace and not self._closed:
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
        """Take a directive, which may allow replacements that wait for it."""
        self._directive = directive
        if directive.spare_positions is not msgspec.UNSET:
            self._moves.update((each, at) for each, at in directive.spare_positions.items() if each in self._places)
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
        """Start no more workers."""
        self._closed = True
        for task in self._starting:
            task.cancel()
        for worker_id, again in self._unforked.items():
            # If the retry was sent already, the fork server reports its outcome.
            if again.cancel():
                self._forget(worker_id)

    def signal(self, worker_id: str, number: signal.Signals) -> None:
        """Send a signal to a live worker."""
        pid = self._living.get(worker_id)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def wait(self, limit_s: float) -> bool:
        """Wait up to ``limit_s`` until all workers have ended; return whether they have."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.all_ended.wait(), limit_s)
        return self.all_ended.is_set()

    async def end(self, limit_s: float) -> None:
        """Send SIGTERM to all workers, and SIGKILL to those still there after ``limit_s``."""
        self.close()
        for worker_id in self.living:
            self.signal(worker_id, signal.SIGTERM)
        if not await self.wait(limit_s):
            for worker_id in self.living:
                self.signal(worker_id, signal.SIGKILL)


def _wanted(directive: Directive | None, worker_id: str) -> bool:
    """Return whether the lighthouse knows of this loss and wants a replacement."""
    if directive is None or not directive.replacing:
        return False
    made = (each for each in (directive.generation, directive.upcoming) if each is not None)
    return all(each.rank_of(worker_id) is None for each in made)
