"""The agent of one host: runs the lighthouse (unless one is named), the fork server and the workers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import ssl
import time
from collections.abc import Callable
from typing import Any

from craft.agent.host.first_position import FirstPosition
from craft.agent.host.fork_server_keeper import ForkServerKeeper
from craft.agent.host.injections import AgentInjections
from craft.agent.host.inspection import WorkerInspector
from craft.agent.host.lease import WorkerLease
from craft.agent.host.own_lighthouse import OwnLighthouse
from craft.agent.host.preemption import LEAVE_S, HostPreemption, PreemptFile
from craft.agent.host.relay import Relay
from craft.agent.host.retry import first_of, retry
from craft.agent.host.watchdog_reports import WatchdogReports
from craft.agent.host.worker_ends import RemainingWorkers, WorkerEnds
from craft.agent.host.worker_pool import WorkerPool
from craft.agent.linux.host_access import HostAccess
from craft.agent.outcome import JobOutcome, after_training, with_status
from craft.agent.watchdog.watchdog import Watchdog
from craft.decide.policies.policy import EXIT_PREEMPTED
from craft.protocol.errors import ConfigError, CraftError, Unauthorized, Unreachable
from craft.protocol.messages import Directive
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
_TERMINATED = 143


class Supervisor:
    """Runs a job on one host; ``run`` returns once the job is over and all its processes have ended."""

    _ends_starting = True
    """Whether workers that have not joined are ended when the job is over."""

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
        self._run_dir_logged = False
        self._watch = watch
        self._over: asyncio.Future[JobOutcome] = asyncio.get_running_loop().create_future()
        self._interrupted: asyncio.Future[JobOutcome] = asyncio.get_running_loop().create_future()
        self._watchdog = Watchdog(settings.hang_limits, time.monotonic, self._outside)
        self._preemption: HostPreemption | None = None
        self._preempt_file = PreemptFile(settings.preempt_file) if settings.preempt_file is not None else None
        self._found: dict[str, Any] = {}
        """The status of the job when this agent started, if the job runs already."""
        self._lighthouse: OwnLighthouse | None = None
        self._tls: ssl.SSLContext | None = None
        self._forks: ForkServerKeeper | None = None
        # In memory: workers write there all the time and must not wait for a disk.
        self._scratch = self._outside.scratch()
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
            self.pool = WorkerPool(
                self._settings,
                self._run_dir,
                self._scratch.path,
                state_key(self.token),
                self._watchdog,
                self._exhausted,
                self.relay.carried_bytes,
                # Ids of an earlier agent's workers are never reused.
                first_number=self._found.get("next_numbers", {}).get(self._settings.worker_prefix, 0),
                world_size=self._found.get("slots"),
            )
            self._first_position = FirstPosition(self._settings, self.relay)
            self._ends = WorkerEnds(self.relay, self.pool, self._may_replace, self._worker_gone)
            self._forks = ForkServerKeeper(
                self._settings, self.pool, is_over=self._over.done, on_ended=self._ends.ended, on_lost=self._ends.take
            )
            self._preemption = HostPreemption(self.relay, self.pool, self._settings, self._preempted)
            self._injections = AgentInjections(self._settings.host, self.pool.signal)
            self._watchdog_reports = WatchdogReports(self._watchdog, self.relay, self._stopped)
            self._inspector = WorkerInspector(self._watchdog, self.relay, self._run_dir)
            self.relay.on_look, self.relay.on_told = self._inspector.ask, self._inspector.told
            self._watchdog.ask_worker = self._inspector.own_stacks
            self._lease = WorkerLease(self._settings.lease_s, self.relay, self.pool, self._watchdog, self._outside)
            asyncio.get_running_loop().set_exception_handler(AcceptErrors("the agent"))
            server = await asyncio.start_unix_server(self.relay.serve_worker, path=str(self._scratch.path / "agent"))
            async with server:
                tasks.append(asyncio.create_task(self._guarded(self.relay.follow_lighthouse())))
                tasks.append(asyncio.create_task(self._guarded(self._serve_workers())))
                if self._lighthouse is not None:
                    tasks.append(asyncio.create_task(self._guarded(self._lighthouse.keep(self._readdress))))
                tasks.append(asyncio.create_task(self._guarded(self._tick())))
                if self._preempt_file is not None:
                    give_up = functools.partial(self._interrupt, _TERMINATED)
                    tasks.append(asyncio.create_task(self._preemption.watch(self._preempt_file, give_up)))
                await self._start_workers()
                outcome = await self._end_job(await self._over)
                outcome = await self._count_faults(outcome)
        finally:
            for task in tasks:
                task.cancel()
            await self._end_helpers()
            self._scratch.close()
        return outcome

    async def _guarded(self, work: Any) -> None:
        """Run a task whose failure ends the job; the error is the reason."""
        try:
            await work
        except CraftError as error:
            self._finish(JobOutcome(exit_code=2 if isinstance(error, ConfigError) else 3, reason=str(error)))
        except Exception as error:
            # The edge of the task: without it the job would hang.
            logger.exception("the agent cannot go on")
            self._finish(JobOutcome(exit_code=3, reason=f"the agent failed: {type(error).__name__}: {error}"))

    def _finish(self, outcome: JobOutcome) -> None:
        if not self._over.done():
            self._over.set_result(outcome)

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt, 130, "interrupted by SIGINT")
        loop.add_signal_handler(signal.SIGTERM, self._terminate, "interrupted by SIGTERM")

    def _preempted(self, reason: str) -> None:
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

    def _readdress(self) -> None:
        """Take the address of a restarted lighthouse, which changes if its port was taken."""
        self.url = self._run_dir.read_address()
        if self.relay is not None:
            self.relay.url = self.url

    async def _greet_lighthouse(self) -> None:
        """Check that the lighthouse accepts our token before starting anything; wait while it is starting."""
        client = self._outside.client(self.url, self.token, tls=self._tls)

        async def ask() -> dict[str, Any]:
            try:
                return await asyncio.to_thread(client.get_status)
            except Unreachable:
                if self._over.done():
                    return {}
                raise

        try:
            self._found = await retry(ask, Unreachable, limit_s=_START_S, every_s=_ASK_AGAIN_S)
        except Unauthorized:
            file = self._settings.token_file
            raise Unauthorized(f"the lighthouse at {self.url} does not accept the token in {file}") from None
        self._check_replica_size()

    def _check_replica_size(self) -> None:
        ours, theirs = self._settings.workers_per_replica, self._found.get("replica_size", 1)
        if self._found and ours != theirs:
            raise ConfigError(
                f"--workers-per-replica is {ours} here and {theirs} at the lighthouse at {self.url}: give both the same"
            )

    async def _serve_workers(self) -> None:
        """Provide worker processes until the job is over."""
        assert self._forks is not None
        await self._forks.run()

    async def _start_workers(self) -> None:
        assert self._forks is not None
        await first_of(self._forks.ready, self._over)
        await first_of(self._first_position.known, self._over)
        if not self._over.done():
            self.pool.begin(late=self._has_begun(), first_position=self._first_position.value)

    def _has_begun(self) -> bool:
        """Return whether the job has begun; its members then do not wait for workers that start now."""
        directive = self.relay.directive if self.relay is not None else None
        if directive is not None:
            return directive.generation is not None or directive.restoration is not None
        return bool(self._found.get("generation"))

    def _exhausted(self, reason: str) -> None:
        assert self.relay is not None
        self.relay.say(exhausted=reason)

    def _may_replace(self) -> bool:
        return not self._over.done()

    def _worker_gone(self) -> None:
        """Called after each end of a worker."""

    def _directed(self, directive: Directive) -> None:
        for worker_id in directive.fenced:
            self._inspector.then(worker_id, functools.partial(self._end_fenced, worker_id))
        self._first_position.directed(directive)
        self._injections.take(directive.injections)
        self.pool.directed(directive)
        if directive.stopping or directive.winding_down is not None or directive.preempting is not None:
            self.pool.close()
        if directive.stopping:
            self._finish(
                JobOutcome(exit_code=directive.exit_code, reason=directive.reason, traceback=directive.traceback)
            )

    def _stopped(self, worker_id: str) -> None:
        """End a stopped worker that has not joined: the lighthouse does not know it."""
        if not self._has_joined(worker_id):
            logger.warning("%s was stopped before it joined: killing it", worker_id)
            self.pool.signal(worker_id, signal.SIGKILL)

    def _has_joined(self, worker_id: str) -> bool:
        assert self.relay is not None
        report = self.relay.reports().get(worker_id)
        return report is not None and report.joined

    def _end_fenced(self, worker_id: str) -> None:
        self.pool.signal(worker_id, signal.SIGKILL)

    async def _tick(self) -> None:
        assert self.relay is not None
        while True:
            self._watchdog_reports.look()
            self._lease.look()
            self._check_run_dir()
            self._ends.count_starting()
            self._watch(self)
            await asyncio.sleep(_TICK_S)

    def _check_run_dir(self) -> None:
        trouble = self._held.trouble()
        if trouble and not self._run_dir_logged:
            what = "the next loss ends the job" if self._lighthouse is not None else "its workers have no records"
            logger.error("%s. Training goes on, but nothing is recorded, and %s", trouble, what)
        self._run_dir_logged = bool(trouble)

    async def _end_job(self, outcome: JobOutcome) -> JobOutcome:
        """Let workers finish their scripts if the job succeeded; else end them."""
        if self._interrupted.done() and self._lighthouse is not None:
            await self._end_lighthouse(self._lighthouse, outcome.reason)
        if outcome.exit_code == 0:
            remaining = RemainingWorkers(self.pool, self._watchdog, self._has_joined, end_starting=self._ends_starting)
            ending = asyncio.create_task(remaining.run())
            await first_of(self.pool.all_ended, self._interrupted)
            ending.cancel()
            assert self.relay is not None
            reports = self.relay.reports().values()
            outcome = self._interrupted.result() if self._interrupted.done() else after_training(outcome, reports)
        elif outcome.exit_code == EXIT_PREEMPTED and self._all_left():
            # Their scripts may finish, too, but time is short.
            await self.pool.wait(LEAVE_S)
        if self.pool.living:
            await self.pool.end(LEAVE_S)
        self._watch(self)
        return outcome

    async def _end_lighthouse(self, lighthouse: OwnLighthouse, reason: str) -> None:
        """End the lighthouse before the workers: it would declare them lost."""
        with contextlib.suppress(CraftError):
            await asyncio.to_thread(self._outside.client(self.url, self.token, _ANSWER_S).stop, reason)
        await lighthouse.end()

    def _all_left(self) -> bool:
        assert self.relay is not None
        reports = self.relay.reports()
        return all(worker_id in reports and reports[worker_id].left for worker_id in self.pool.living)

    async def _count_faults(self, outcome: JobOutcome) -> JobOutcome:
        """Add the job's faults and checkpoint, which only the lighthouse knows, if it is on another host."""
        if self._settings.lighthouse is None:
            return outcome
        try:
            status = await asyncio.to_thread(self._outside.client(self.url, self.token, tls=self._tls).get_status)
        except CraftError as error:
            logger.info("no fault list from the lighthouse: %s", error)
            return outcome
        return with_status(outcome, status)

    async def _end_helpers(self) -> None:
        if self._forks is not None:
            await self._forks.end()
        if self._lighthouse is not None:
            await self._lighthouse.end()


def supervise(settings: RunSettings, run_dir: RunDir, watch: Callable[[Supervisor], None]) -> JobOutcome:
    """Run the job on this host from beginning to end."""

    async def go() -> JobOutcome:
        return await Supervisor(settings, run_dir, watch).run()

    return asyncio.run(go())
