"""The agent of one host: starts the lighthouse (if none is named), the fork server and the workers, and sees it through."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from craft.agent.crew import Crew
from craft.agent.forkserver import Ended, Forked, Outgoing, Ready
from craft.agent.injections import Injections
from craft.agent.looks import Looks
from craft.agent.own_lighthouse import OwnLighthouse
from craft.agent.relay import Relay
from craft.agent.room import LEAVE_S, PreemptFile, Room
from craft.agent.scratch import Scratch
from craft.agent.stranded import Stranded
from craft.agent.watch import Watchdog
from craft.agent.watch_over import WatchOver
from craft.decide.policies import EXIT_PREEMPTED
from craft.protocol.errors import ConfigError, CraftError, Unauthorized, Unreachable
from craft.protocol.messages import Directive, Exited
from craft.settings.run import RunSettings
from craft.settings.rundir import RunDir
from craft.wire.auth import ensure_token, read_token, state_key
from craft.wire.client import Client
from craft.wire.tls import client_context

logger = logging.getLogger(__name__)

_START_S = 60.0
_TICK_S = 0.1
_ASK_AGAIN_S = 0.1
_ANSWER_S = 2.0
_TERMINATED = 143


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
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

    def __init__(self, settings: RunSettings, run_dir: RunDir, watch: Callable[[Supervisor], None]) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._watch = watch
        self._over: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._interrupted: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._watchdog = Watchdog(settings.hang_limits)
        self._room: Room | None = None
        self._preempt_file = PreemptFile(settings.preempt_file) if settings.preempt_file is not None else None
        self._found: dict[str, Any] = {}
        """The status of a job that runs already, as it was when this agent came."""
        self._lighthouse: OwnLighthouse | None = None
        self._tls: ssl.SSLContext | None = None
        self._fork_server: asyncio.subprocess.Process | None = None
        self._fork_writer: asyncio.StreamWriter | None = None
        self._forks_ready = asyncio.Event()
        # In memory: what workers write there all the time must not wait for a disk.
        self._scratch = Scratch()
        self._sockets = self._scratch.path
        self.url = ""
        self.token = ""
        self.relay: Relay | None = None

    async def run(self) -> Outcome:
        tasks: list[asyncio.Task[None]] = []
        try:
            self._catch_signals()
            await self._find_lighthouse()
            self.relay = Relay(self._settings.host, self.url, self.token, self._directed, self._tls)
            self._crew = Crew(
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
            self._room = Room(self.relay, self._crew, self._settings, self._made_room)
            self._injections = Injections(self._settings.host, self._crew.signal)
            self._watch_over = WatchOver(self._watchdog, self.relay, self._stopped)
            self._looks = Looks(self._watchdog, self.relay, self._run_dir)
            self.relay.on_look, self.relay.on_told = self._looks.ask, self._looks.told
            self._watchdog.ask_worker = self._looks.own_stacks
            self._stranded = Stranded(self._settings.lease_s, self.relay, self._crew, self._watchdog)
            server = await asyncio.start_unix_server(self.relay.serve_worker, path=str(self._socket_path))
            async with server:
                tasks.append(asyncio.create_task(self._guarded(self.relay.follow_lighthouse())))
                tasks.append(asyncio.create_task(self._guarded(self._serve_forks())))
                if self._lighthouse is not None:
                    tasks.append(asyncio.create_task(self._guarded(self._lighthouse.keep(self._moved))))
                tasks.append(asyncio.create_task(self._tick()))
                if self._preempt_file is not None:
                    give_up = functools.partial(self._interrupt, _TERMINATED)
                    tasks.append(asyncio.create_task(self._room.watch(self._preempt_file, give_up)))
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
    def _socket_path(self) -> Path:
        return self._sockets / "agent"

    async def _guarded(self, work: Any) -> None:
        """A task whose failure ends the job, with its reason."""
        try:
            await work
        except CraftError as error:
            self._finish(Outcome(exit_code=2 if isinstance(error, ConfigError) else 3, reason=str(error)))

    def _finish(self, outcome: Outcome) -> None:
        if not self._over.done():
            self._over.set_result(outcome)

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt, 130, "interrupted by SIGINT")
        loop.add_signal_handler(signal.SIGTERM, self._terminate, "interrupted by SIGTERM")

    def _made_room(self, reason: str) -> None:
        self._finish(Outcome(exit_code=EXIT_PREEMPTED, reason=reason))

    def _terminate(self, reason: str) -> None:
        if self._room is None or not self._room.on_sigterm():
            self._interrupt(_TERMINATED, reason)

    def _interrupt(self, exit_code: int, reason: str) -> None:
        outcome = Outcome(exit_code=exit_code, reason=reason)
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
        self.token = ensure_token(self._settings.token_file or self._run_dir.token)
        self._lighthouse = OwnLighthouse(self._settings, self._run_dir)
        await self._lighthouse.start()
        self.url = self._run_dir.read_address()

    def _moved(self) -> None:
        """The lighthouse was started again: usually where it was, unless somebody took its port meanwhile."""
        self.url = self._run_dir.read_address()
        if self.relay is not None:
            self.relay.url = self.url

    async def _greet_lighthouse(self) -> None:
        """Make sure that it is there and accepts our token, before anything is started; it may be starting, too."""
        client = Client(self.url, self.token, tls=self._tls)
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
        """Start the fork server and follow what it says."""
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._settings.threads)}
        # In a session of its own: Ctrl-C is the agent's business, also while the fork server imports torch.
        self._fork_server = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "craft.agent.forkserver", str(theirs.fileno()), str(os.getpid()),
            *filter(None, map(str.strip, self._settings.preload.split(","))),
            pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL, env=environment, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        reader, self._fork_writer = await asyncio.open_connection(sock=ours)
        while line := await reader.readline():
            message = msgspec.json.decode(line, type=Outgoing)
            if isinstance(message, Ready):
                self._forks_ready.set()
            elif isinstance(message, Forked):
                self._crew.forked(message.worker_id, message.pid)
            elif isinstance(message, Ended):
                self._ended(message)
        raise Unreachable("the fork server ended, and its workers with it")

    async def _start_workers(self) -> None:
        ready = asyncio.ensure_future(self._forks_ready.wait())
        either: set[asyncio.Future[Any]] = {ready, self._over}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._over.done():
            return
        assert self._fork_writer is not None
        self._crew.begin(self._fork_writer, late=self._has_begun())

    def _has_begun(self) -> bool:
        """Whether the job is on its way: whoever comes now is nobody that the others wait for."""
        directive = self.relay.directive if self.relay is not None else None
        if directive is not None:
            return directive.generation is not None or directive.restoration is not None
        return bool(self._found.get("generation"))

    def _first_number(self) -> int:
        """Past every worker that an earlier agent of this host started: ids are never used twice."""
        prefix = self._settings.worker_prefix
        known = [worker["worker_id"] for worker in self._found.get("workers", ())]
        numbers = [
            int(name[len(prefix) :]) for name in known if name.startswith(prefix) and name[len(prefix) :].isdigit()
        ]
        return max(numbers, default=-1) + 1

    def _exhausted(self, reason: str) -> None:
        assert self.relay is not None
        self.relay.say(exhausted=reason)

    def _ended(self, message: Ended) -> None:
        assert self.relay is not None
        report = self.relay.reports().get(message.worker_id)
        self._crew.ended(
            message,
            worked=report is not None and report.step > 0 and not report.behind,
            replace=self._replaces(message),
        )
        self.relay.ended(
            Exited(
                worker_id=message.worker_id,
                exit_code=message.exit_code,
                signal=message.signal,
                time=message.time,
            )
        )

    def _replaces(self, message: Ended) -> bool:
        # Whoever ended by itself had its reasons: it finished, or left as it was told.
        return not (message.exit_code == 0 or self._over.done())

    def _directed(self, directive: Directive) -> None:
        for worker_id in directive.fenced:
            self._looks.then(worker_id, functools.partial(self._end_fenced, worker_id))
        self._injections.take(directive.injections)
        self._crew.directed(directive)
        if directive.stopping or directive.winding_down is not None or directive.preempting is not None:
            self._crew.close()
        if directive.stopping:
            self._finish(Outcome(exit_code=directive.exit_code, reason=directive.reason, traceback=directive.traceback))

    def _stopped(self, worker_id: str) -> None:
        """A worker is stopped. Of one that has not joined a job on its way, the others know nothing: nobody else will end it."""
        if self._has_begun() and not self._has_joined(worker_id):
            logger.warning("%s was stopped before it joined the others, and is ended", worker_id)
            self._crew.signal(worker_id, signal.SIGKILL)

    def _has_joined(self, worker_id: str) -> bool:
        assert self.relay is not None
        report = self.relay.reports().get(worker_id)
        return report is not None and report.joined

    def _end_fenced(self, worker_id: str) -> None:
        self._crew.signal(worker_id, signal.SIGKILL)

    async def _tick(self) -> None:
        assert self.relay is not None
        while True:
            self._watch_over.look()
            self._stranded.look()
            self._watch(self)
            await asyncio.sleep(_TICK_S)

    async def _see_out(self, outcome: Outcome) -> Outcome:
        """The job is over: let workers come to the end of their scripts after a good end; else end them."""
        if self._interrupted.done() and self._lighthouse is not None:
            await self._end_lighthouse(self._lighthouse, outcome.reason)
        if outcome.exit_code == 0:
            self._end_starting()
            ended = asyncio.ensure_future(self._crew.all_ended.wait())
            either: set[asyncio.Future[Any]] = {ended, self._interrupted}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            outcome = self._interrupted.result() if self._interrupted.done() else self._after_training(outcome)
        elif outcome.exit_code == EXIT_PREEMPTED and self._all_left():
            # As good an end as any for their scripts, but the time is somebody else's.
            await self._crew.wait(LEAVE_S)
        if self._crew.living:
            await self._crew.end(LEAVE_S)
        self._watch(self)
        return outcome

    async def _end_lighthouse(self, lighthouse: OwnLighthouse, reason: str) -> None:
        """Before the workers end: it would take each of them for one that was lost."""
        with contextlib.suppress(CraftError):
            await asyncio.to_thread(Client(self.url, self.token, _ANSWER_S).stop, reason)
        await lighthouse.end()

    def _end_starting(self) -> None:
        """Whoever has not come to the others by now would only hear that it is too late, perhaps in minutes."""
        for worker_id in self._crew.living:
            if not self._has_joined(worker_id):
                self._crew.signal(worker_id, signal.SIGTERM)

    def _all_left(self) -> bool:
        assert self.relay is not None
        reports = self.relay.reports()
        return all(worker_id in reports and reports[worker_id].left for worker_id in self._crew.living)

    async def _count_faults(self, outcome: Outcome) -> Outcome:
        """In a job of several hosts only the lighthouse knows what happened on the others."""
        if self._settings.lighthouse is None:
            return outcome
        try:
            status = await asyncio.to_thread(Client(self.url, self.token, tls=self._tls).get_status)
        except CraftError as error:
            logger.info("the lighthouse does not say what happened on other hosts: %s", error)
            return outcome
        faults = tuple(f"{', '.join(fault['worker_ids'])}: {fault['reason']}" for fault in status["fault_list"])
        return msgspec.structs.replace(outcome, faults=faults, checkpoint=status["checkpoints"]["last"])

    def _after_training(self, outcome: Outcome) -> Outcome:
        """What a script does after its last step may fail, too."""
        assert self.relay is not None
        # One that failed before its last step was answered then, however late its process ends.
        failures = (report.failed for report in self.relay.reports().values() if report.complete)
        failed = next((failed for failed in failures if failed is not None), None)
        if failed is None:
            return outcome
        reason = f"{failed.error} (worker {failed.worker_id}, after the last step)"
        return Outcome(exit_code=1, reason=reason, traceback=failed.traceback)

    async def _end_helpers(self) -> None:
        if self._fork_writer is not None:
            self._fork_writer.close()
        if self._fork_server is not None:
            if self._fork_server.returncode is None and not self._forks_ready.is_set():
                # It has no workers yet, and would first import torch to the end.
                self._fork_server.kill()
            await self._fork_server.wait()
        if self._lighthouse is not None:
            await self._lighthouse.end()


def supervise(settings: RunSettings, run_dir: RunDir, watch: Callable[[Supervisor], None]) -> Outcome:
    """Run the job on this host from beginning to end."""

    async def go() -> Outcome:
        return await Supervisor(settings, run_dir, watch).run()

    return asyncio.run(go())
