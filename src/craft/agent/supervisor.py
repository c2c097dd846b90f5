"""The agent of one host: starts the lighthouse (if none is named), the fork server and the workers, and sees it through."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from craft.agent.host.injections import AgentInjections
from craft.agent.host.inspection import WorkerInspector
from craft.agent.host.lease import WorkerLease
from craft.agent.host.own_lighthouse import OwnLighthouse
from craft.agent.host.preemption import LEAVE_S, HostPreemption, PreemptFile
from craft.agent.host.relay import Relay
from craft.agent.host.watchdog_reports import WatchdogReports
from craft.agent.host.worker_pool import WorkerPool
from craft.agent.linux.fork_server_process import ForkServerProcess, gone
from craft.agent.linux.forkserver import Ended, Forked, NotForked, Ready
from craft.agent.linux.host_access import HostAccess
from craft.agent.watchdog.watchdog import Watchdog
from craft.decide.policies import EXIT_PREEMPTED
from craft.protocol.errors import ConfigError, CraftError, Unauthorized, Unreachable
from craft.protocol.messages import Directive, Exited, WorkerReport
from craft.settings.run import RunSettings
from craft.settings.rundir import HeldRunDir, RunDir
from craft.wire.accept_errors import AcceptErrors
from craft.wire.auth import own_token, read_token, state_key
from craft.wire.tls import client_context

logger = logging.getLogger(__name__)

_START_S = 60.0
_TICK_S = 0.1
_ASK_AGAIN_S = 0.1
_ANSWER_S = 2.0
_HEAR_OUT_S = 1.0
"""So long something that an ended worker had forked may hold its connection open before its end is believed."""
_TERMINATED = 143
_FORKS_AGAIN_S = 1.0
_MOST_FAILURES = 3
"""So many fork servers that end before they are ready show that the next one will, too."""


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How the job ended, as this host saw it."""

    exit_code: int
    reason: str
    traceback: str | None = None
    faults: tuple[str, ...] | None = None
    """Those of the whole job, where its journal is on another host; None: see the journal."""
    checkpoint: dict[str, Any] | None = None
    """The newest one of the job, likewise."""


class Supervisor:
    """Lives on one event loop; ``run`` returns when the job is over and every process it started has ended."""

    def __init__(
        self,
        settings: RunSettings,
        run_dir: RunDir,
        watch: Callable[[Supervisor], None],
        outside: HostAccess | None = None,
    ) -> None:
        self._settings = settings
        self._outside = outside or HostAccess()
        self._run_dir = run_dir
        self._held = HeldRunDir(run_dir)
        self._told_of_run_dir = False
        self._watch = watch
        self._over: asyncio.Future[JobOutcome] = asyncio.get_running_loop().create_future()
        self._interrupted: asyncio.Future[JobOutcome] = asyncio.get_running_loop().create_future()
        self._watchdog = Watchdog(settings.hang_limits, time.monotonic, self._outside)
        self._preemption: HostPreemption | None = None
        self._preempt_file = PreemptFile(settings.preempt_file) if settings.preempt_file is not None else None
        self._found: dict[str, Any] = {}
        """The status of a job that runs already, as it was when this agent came."""
        self._lighthouse: OwnLighthouse | None = None
        self._tls: ssl.SSLContext | None = None
        self._forks: ForkServerProcess | None = None
        self._forks_ready = asyncio.Event()
        self._hearing: set[asyncio.Task[None]] = set()
        # In memory: what workers write there all the time must not wait for a disk.
        self._scratch = self._outside.scratch()
        self._sockets = self._scratch.path
        self.url = ""
        self.token = ""
        self.relay: Relay | None = None

    async def run(self) -> JobOutcome:
        tasks: list[asyncio.Task[None]] = []
        try:
            self._catch_signals()
            await self._find_lighthouse()
            self.relay = Relay(
                self._settings.host, self.url, self.token, self._directed, self._tls, self._outside.session
            )
            self._pool = WorkerPool(
                self._settings,
                self._run_dir,
                self._sockets,
                state_key(self.token),
                self._watchdog,
                self._exhausted,
                self.relay.carried_bytes,
                first_number=self._first_number(),
                world_size=self._found.get("slots"),
            )
            self._preemption = HostPreemption(self.relay, self._pool, self._settings, self._made_room)
            self._injections = AgentInjections(self._settings.host, self._pool.signal)
            self._watch_over = WatchdogReports(self._watchdog, self.relay, self._stopped)
            self._inspector = WorkerInspector(self._watchdog, self.relay, self._run_dir)
            self.relay.on_look, self.relay.on_told = self._inspector.ask, self._inspector.told
            self._watchdog.ask_worker = self._inspector.own_stacks
            self._lease = WorkerLease(self._settings.lease_s, self.relay, self._pool, self._watchdog, self._outside)
            asyncio.get_running_loop().set_exception_handler(AcceptErrors("the agent"))
            server = await asyncio.start_unix_server(self.relay.serve_worker, path=str(self._socket_path))
            async with server:
                tasks.append(asyncio.create_task(self._guarded(self.relay.follow_lighthouse())))
                tasks.append(asyncio.create_task(self._guarded(self._serve_forks())))
                if self._lighthouse is not None:
                    tasks.append(asyncio.create_task(self._guarded(self._lighthouse.keep(self._moved))))
                tasks.append(asyncio.create_task(self._guarded(self._tick())))
                if self._preempt_file is not None:
                    give_up = functools.partial(self._interrupt, _TERMINATED)
                    tasks.append(asyncio.create_task(self._preemption.watch(self._preempt_file, give_up)))
                await self._start_workers()
                outcome = await self._see_out(await self._over)
                outcome = await self._count_faults(outcome)
        finally:
            for task in tasks:
                task.cancel()
            await self._end_helpers()
            self._scratch.close()
        return outcome

    @property
    def pool(self) -> WorkerPool:
        """The workers of this host; there as soon as ``relay`` is."""
        return self._pool

    @property
    def _socket_path(self) -> Path:
        return self._sockets / "agent"

    async def _guarded(self, work: Any) -> None:
        """A task whose failure ends the job, with its reason."""
        try:
            await work
        except CraftError as error:
            self._finish(JobOutcome(exit_code=2 if isinstance(error, ConfigError) else 3, reason=str(error)))
        except Exception as error:
            # The edge of the task: without it the job would wait for ever for what is not done any more.
            logger.exception("the agent cannot go on")
            self._finish(JobOutcome(exit_code=3, reason=f"the agent failed: {type(error).__name__}: {error}"))

    def _finish(self, outcome: JobOutcome) -> None:
        if not self._over.done():
            self._over.set_result(outcome)

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt, 130, "interrupted by SIGINT")
        loop.add_signal_handler(signal.SIGTERM, self._terminate, "interrupted by SIGTERM")

    def _made_room(self, reason: str) -> None:
        self._finish(JobOutcome(exit_code=EXIT_PREEMPTED, reason=reason))

    def _terminate(self, reason: str) -> None:
        if self._preemption is None or not self._preemption.on_sigterm():
            self._interrupt(_TERMINATED, reason)

    def _interrupt(self, exit_code: int, reason: str) -> None:
        outcome = JobOutcome(exit_code=exit_code, reason=reason)
        if not self._interrupted.done():
            self._interrupted.set_result(outcome)
        self._finish(outcome)

    async def _find_lighthouse(self) -> None:
        if self._settings.lighthouse is not None:
            self.url = self._settings.lighthouse.rstrip("/")
            assert self._settings.token_file is not None
            self.token = read_token(self._settings.token_file)
            self._tls = client_context(self._settings.tls_ca) if self.url.startswith("https:") else None
            await self._greet_lighthouse()
            return
        self.token = own_token(self._run_dir, self._settings.token_file)
        self._lighthouse = OwnLighthouse(self._settings, self._run_dir, self._held)
        await self._lighthouse.start()
        self.url = self._run_dir.read_address()

    def _moved(self) -> None:
        """The lighthouse was started again: usually where it was, unless somebody took its port meanwhile."""
        self.url = self._run_dir.read_address()
        if self.relay is not None:
            self.relay.url = self.url

    async def _greet_lighthouse(self) -> None:
        """Make sure that it is there and accepts our token, before anything is started; it may be starting, too."""
        client = self._outside.client(self.url, self.token, tls=self._tls)
        deadline = time.monotonic() + _START_S
        while True:
            try:
                self._found = await asyncio.to_thread(client.get_status)
                return
            except Unauthorized:
                file = self._settings.token_file
                raise Unauthorized(f"the lighthouse at {self.url} does not accept the token in {file}") from None
            except Unreachable:
                if self._over.done():
                    return
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_ASK_AGAIN_S)

    async def _serve_forks(self) -> None:
        """Keep a fork server running, and follow what it says."""
        failures = 0
        while failures < _MOST_FAILURES:
            self._forks = await self._start_forks()
            failures = 0 if await self._follow_forks(self._forks) else failures + 1
            await self._forks.end()
            if self._over.done():
                return
            if not self._pool.may_start and not self._pool.started:
                break
            await self._lose_forks()
            if not self._pool.may_start:
                # The lighthouse knows that they ended, and what follows from it: others may go on.
                return
        why = "" if failures < _MOST_FAILURES else f", {failures} times in a row before it had imported what it has to"
        raise Unreachable(f"the fork server ended, and its workers with it{why}")

    async def _start_forks(self) -> ForkServerProcess:
        """Start a fork server; a system that gives no process is asked again for a while."""
        deadline, said = time.monotonic() + _START_S, False
        while True:
            try:
                return await ForkServerProcess.start(self._settings)
            except OSError as error:
                why = error.strerror or str(error)
                if time.monotonic() > deadline:
                    raise Unreachable(f"the fork server could not be started for {_START_S:g} s: {why}") from None
                if not said:
                    logger.error("the fork server cannot be started: %s. It is tried again every second", why)
                said = True
            await asyncio.sleep(_FORKS_AGAIN_S)

    async def _follow_forks(self, forks: ForkServerProcess) -> bool:
        """Return when it has ended: whether it was ever ready."""
        is_ready = False
        async for message in forks.messages():
            if isinstance(message, Ready):
                is_ready = True
                self._forks_ready.set()
                self._pool.resume(forks.writer)
            elif isinstance(message, Forked):
                self._pool.forked(message.worker_id, message.pid)
            elif isinstance(message, NotForked):
                self._pool.not_forked(message.worker_id, message.why)
            elif isinstance(message, Ended):
                self._ended(message)
        return is_ready

    async def _lose_forks(self) -> None:
        """All workers ended with their fork server: others are started by the next one, if any are."""
        pids = self._pool.pause()
        then = "another one is started" if self._pool.may_start else "no more workers are started"
        logger.warning("the fork server ended, and its workers with it: %s", then)
        await gone(pid for pid in pids.values() if pid is not None)
        for worker_id in pids:
            self._take_end(
                Ended(
                    worker_id=worker_id,
                    exit_code=None,
                    signal=signal.SIGKILL,
                    time=time.time(),
                    why="with the fork server of its host",
                )
            )

    async def _start_workers(self) -> None:
        ready = asyncio.ensure_future(self._forks_ready.wait())
        either: set[asyncio.Future[Any]] = {ready, self._over}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if not self._over.done():
            self._pool.begin(late=self._has_begun())

    def _has_begun(self) -> bool:
        """Whether the job is on its way: whoever comes now is nobody that the others wait for."""
        directive = self.relay.directive if self.relay is not None else None
        if directive is not None:
            return directive.generation is not None or directive.restoration is not None
        return bool(self._found.get("generation"))

    def _first_number(self) -> int:
        """Past every worker that an earlier agent of this host started: ids are never used twice."""
        return int(self._found.get("next_numbers", {}).get(self._settings.worker_prefix, 0))

    def _exhausted(self, reason: str) -> None:
        assert self.relay is not None
        self.relay.say(exhausted=reason)

    def _ended(self, message: Ended) -> None:
        if message.exit_code != 0:
            self._take_end(message)
            return
        # What that means depends on what the worker has said: first all of it is heard.
        task = asyncio.create_task(self._hear_out(message))
        self._hearing.add(task)
        task.add_done_callback(self._hearing.discard)

    async def _hear_out(self, message: Ended) -> None:
        assert self.relay is not None
        await self.relay.hear_out(message.worker_id, _HEAR_OUT_S)
        self._take_end(message)

    def _take_end(self, message: Ended) -> None:
        assert self.relay is not None
        if message.worker_id in self._pool.ended_ids:
            return
        report = self.relay.reports().get(message.worker_id)
        self._pool.ended(
            message,
            worked=report is not None and report.step > 0 and not report.behind and not _was_refused(report),
            waited=message.signal == signal.SIGKILL and report is not None and report.joined and not report.generation,
            replace=self._replaces(message, report),
        )
        # With its end, it is heard whether another one comes.
        self._count_starting()
        self.relay.ended(
            Exited(
                worker_id=message.worker_id,
                exit_code=message.exit_code,
                signal=message.signal,
                time=message.time,
                why=message.why,
            )
        )

    def _replaces(self, message: Ended, report: WorkerReport | None) -> bool:
        if self._over.done():
            return False
        if message.exit_code != 0:
            return True
        # It finished, or left as it was told; else it ended by os._exit(0) or the like, before the end of its script.
        return report is None or not (report.complete or report.script_ended or report.left)

    def _directed(self, directive: Directive) -> None:
        for worker_id in directive.fenced:
            self._inspector.then(worker_id, functools.partial(self._end_fenced, worker_id))
        self._injections.take(directive.injections)
        self._pool.directed(directive)
        if directive.stopping or directive.winding_down is not None or directive.preempting is not None:
            self._pool.close()
        if directive.stopping:
            self._finish(
                JobOutcome(exit_code=directive.exit_code, reason=directive.reason, traceback=directive.traceback)
            )

    def _stopped(self, worker_id: str) -> None:
        """A worker is stopped. Of one that has not joined, the lighthouse knows nothing: no other will end it."""
        if not self._has_joined(worker_id):
            logger.warning("%s was stopped before it joined the others, and is ended", worker_id)
            self._pool.signal(worker_id, signal.SIGKILL)

    def _has_joined(self, worker_id: str) -> bool:
        assert self.relay is not None
        report = self.relay.reports().get(worker_id)
        return report is not None and report.joined

    def _end_fenced(self, worker_id: str) -> None:
        self._pool.signal(worker_id, signal.SIGKILL)

    async def _tick(self) -> None:
        assert self.relay is not None
        while True:
            self._watch_over.look()
            self._lease.look()
            self._look_for_run_dir()
            self._count_starting()
            self._watch(self)
            await asyncio.sleep(_TICK_S)

    def _count_starting(self) -> None:
        """A job that begins again waits for those that are on their way, and for nobody else."""
        assert self.relay is not None
        joined = [worker_id for worker_id, report in self.relay.reports().items() if report.joined]
        starting = self._pool.starting(joined)
        if starting != self.relay.report.starting:
            self.relay.say(starting=starting)

    def _look_for_run_dir(self) -> None:
        trouble = self._held.trouble()
        if trouble and not self._told_of_run_dir:
            what = "the next loss ends the job" if self._lighthouse is not None else "its workers have no records"
            logger.error("%s. Training goes on, but nothing is written down, and %s", trouble, what)
        self._told_of_run_dir = bool(trouble)

    async def _see_out(self, outcome: JobOutcome) -> JobOutcome:
        """The job is over: let workers come to the end of their scripts after a good end; else end them."""
        if self._interrupted.done() and self._lighthouse is not None:
            await self._end_lighthouse(self._lighthouse, outcome.reason)
        if outcome.exit_code == 0:
            ending = asyncio.create_task(self._end_remaining())
            ended = asyncio.ensure_future(self._pool.all_ended.wait())
            either: set[asyncio.Future[Any]] = {ended, self._interrupted}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            ending.cancel()
            outcome = self._interrupted.result() if self._interrupted.done() else self._after_training(outcome)
        elif outcome.exit_code == EXIT_PREEMPTED and self._all_left():
            # As good an end as any for their scripts, but the time is somebody else's.
            await self._pool.wait(LEAVE_S)
        if self._pool.living:
            await self._pool.end(LEAVE_S)
        self._watch(self)
        return outcome

    async def _end_lighthouse(self, lighthouse: OwnLighthouse, reason: str) -> None:
        """Before the workers end: it would take each of them for one that was lost."""
        with contextlib.suppress(CraftError):
            await asyncio.to_thread(self._outside.client(self.url, self.token, _ANSWER_S).stop, reason)
        await lighthouse.end()

    async def _end_remaining(self) -> None:
        """After a good end, end workers that would not come to theirs by themselves, or only in minutes."""
        asked: dict[str, float] = {}
        stopped: dict[str, float] = {}
        while True:
            self._end_starting(asked)
            self._end_stopped(stopped)
            await asyncio.sleep(_TICK_S)

    def _end_starting(self, asked: dict[str, float]) -> None:
        """End workers that have not joined the others: they would only hear that it is too late.

        Also one that is forked only now. Its script may handle SIGTERM: after a while it gets SIGKILL.
        """
        for worker_id in self._pool.living:
            if self._has_joined(worker_id):
                continue
            if worker_id not in asked:
                asked[worker_id] = time.monotonic()
                self._pool.signal(worker_id, signal.SIGTERM)
            elif time.monotonic() - asked[worker_id] > LEAVE_S:
                self._pool.signal(worker_id, signal.SIGKILL)

    def _end_stopped(self, since: dict[str, float]) -> None:
        """End workers that a signal has stopped for a while: the job has all that it needs of them."""
        now, stopped = time.monotonic(), self._watchdog.stopped() & self._pool.living
        for worker_id in since.keys() - stopped:
            del since[worker_id]
        for worker_id in stopped:
            if now - since.setdefault(worker_id, now) > LEAVE_S:
                logger.warning("%s was stopped by a signal as the job came to its end, and is ended", worker_id)
                self._pool.signal(worker_id, signal.SIGKILL)
                del since[worker_id]

    def _all_left(self) -> bool:
        assert self.relay is not None
        reports = self.relay.reports()
        return all(worker_id in reports and reports[worker_id].left for worker_id in self._pool.living)

    async def _count_faults(self, outcome: JobOutcome) -> JobOutcome:
        """In a job of several hosts only the lighthouse knows what happened on the others."""
        if self._settings.lighthouse is None:
            return outcome
        try:
            status = await asyncio.to_thread(self._outside.client(self.url, self.token, tls=self._tls).get_status)
        except CraftError as error:
            logger.info("the lighthouse does not say what happened on other hosts: %s", error)
            return outcome
        faults = tuple(f"{', '.join(fault['worker_ids'])}: {fault['reason']}" for fault in status["fault_list"])
        return msgspec.structs.replace(outcome, faults=faults, checkpoint=status["checkpoints"]["last"])

    def _after_training(self, outcome: JobOutcome) -> JobOutcome:
        """What a script does after its last step may fail, too."""
        assert self.relay is not None
        # One that failed before its last step was answered then, however late its process ends.
        failures = (report.failed for report in self.relay.reports().values() if report.complete)
        failed = next((failed for failed in failures if failed is not None), None)
        if failed is None:
            return outcome
        reason = f"{failed.error} (worker {failed.worker_id}, after the last step)"
        return JobOutcome(exit_code=1, reason=reason, traceback=failed.traceback)

    async def _end_helpers(self) -> None:
        if self._forks is not None:
            await self._forks.end()
        if self._lighthouse is not None:
            await self._lighthouse.end()


def _was_refused(report: WorkerReport) -> bool:
    """Whether a worker had no part in the job in the end: the next one would most likely be refused, too."""
    return report.failed is not None and report.failed.refused


def supervise(settings: RunSettings, run_dir: RunDir, watch: Callable[[Supervisor], None]) -> JobOutcome:
    """Run the job on this host from beginning to end."""

    async def go() -> JobOutcome:
        return await Supervisor(settings, run_dir, watch).run()

    return asyncio.run(go())
