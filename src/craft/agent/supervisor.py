"""The agent of one host: starts the lighthouse (if none is named), the fork server and the workers, and sees it through."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from craft.agent.forkserver import Ended, Fork, Forked, Outgoing, Ready
from craft.agent.relay import Relay
from craft.protocol.errors import ConfigError, CraftError, Unauthorized, Unreachable
from craft.protocol.messages import Directive, Exited
from craft.settings.run import RunSettings
from craft.settings.rundir import RunDir
from craft.wire.auth import ensure_token, read_token
from craft.wire.client import Client

logger = logging.getLogger(__name__)

_LEAVE_S = 3.0
"""Workers that are told to end have this long before they are killed."""
_START_S = 60.0
_RESTART_S = 0.1
_OWN_HOST_LIMIT_S = 10.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How the job ended, as this host saw it."""

    exit_code: int
    reason: str
    traceback: str | None = None


class Supervisor:
    """Lives on one event loop; ``run`` returns when the job is over and every process it started has ended."""

    def __init__(self, settings: RunSettings, run_dir: RunDir, watch: Callable[[Supervisor], None]) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._watch = watch
        self._over: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._interrupted: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._living: dict[str, int] = {}
        self._failed: set[str] = set()
        """Workers that ended with an error after the job was over."""
        self._all_ended = asyncio.Event()
        self._lighthouse: asyncio.subprocess.Process | None = None
        self._fork_server: asyncio.subprocess.Process | None = None
        self._fork_writer: asyncio.StreamWriter | None = None
        self._forks_ready = asyncio.Event()
        self._sockets = Path(tempfile.mkdtemp(prefix="craft-"))
        self._started = 0
        self.url = ""
        self.token = ""
        self.relay: Relay | None = None

    async def run(self) -> Outcome:
        tasks: list[asyncio.Task[None]] = []
        try:
            self._catch_signals()
            await self._find_lighthouse()
            self.relay = Relay(self._settings.host, self.url, self.token, self._directed)
            server = await asyncio.start_unix_server(self.relay.serve_worker, path=str(self._socket_path))
            async with server:
                tasks.append(asyncio.create_task(self._guarded(self.relay.follow_lighthouse())))
                tasks.append(asyncio.create_task(self._guarded(self._serve_forks())))
                tasks.append(asyncio.create_task(self._guarded(self._keep_lighthouse())))
                tasks.append(asyncio.create_task(self._tick()))
                await self._start_workers()
                outcome = await self._see_out(await self._over)
        finally:
            for task in tasks:
                task.cancel()
            await self._end_helpers()
            shutil.rmtree(self._sockets, ignore_errors=True)
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
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            outcome = Outcome(exit_code=code, reason=f"interrupted by {signal.Signals(number).name}")
            loop.add_signal_handler(number, self._interrupt, outcome)

    def _interrupt(self, outcome: Outcome) -> None:
        if not self._interrupted.done():
            self._interrupted.set_result(outcome)
        self._finish(outcome)

    async def _find_lighthouse(self) -> None:
        if self._settings.lighthouse is not None:
            self.url = self._settings.lighthouse.rstrip("/")
            assert self._settings.token_file is not None
            self.token = read_token(self._settings.token_file)
            await self._greet_lighthouse()
            return
        self.token = ensure_token(self._settings.token_file or self._run_dir.token)
        self._lighthouse = await self._start_lighthouse()
        self.url = self._run_dir.read_address()

    async def _greet_lighthouse(self) -> None:
        """Make sure that it is there and accepts our token, before anything is started; it may be starting, too."""
        client = Client(self.url, self.token)
        deadline = time.monotonic() + _START_S
        while True:
            try:
                await asyncio.to_thread(client.get_status)
                return
            except Unauthorized:
                file = self._settings.token_file
                raise Unauthorized(f"the lighthouse at {self.url} does not accept the token in {file}") from None
            except Unreachable:
                if self._over.done():
                    return
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_RESTART_S)

    async def _start_lighthouse(self) -> asyncio.subprocess.Process:
        command = [sys.executable, "-m", "craft.cli.main", "lighthouse", "--with-parent"]
        command += ["--dir", str(self._run_dir.path), "--workers", str(self._settings.workers)]
        command += ["--min-workers", str(self._settings.min_workers), "--on-loss", self._settings.on_loss]
        # With one host there is nobody to go on without it: silence of a busy machine must not end the job.
        command += ["--port", str(self._settings.port), "--heartbeat-limit", str(_OWN_HOST_LIMIT_S)]
        if self._settings.token_file is not None:
            command += ["--token-file", str(self._settings.token_file)]
        with self._run_dir.lighthouse_log.open("ab") as log:
            before = log.tell()
            process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True
            )
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), _START_S)
        if not line:
            said = self._run_dir.lighthouse_log.read_bytes()[before:].decode(errors="replace").strip()
            raise ConfigError(said.removeprefix("craft lighthouse: ") or "the lighthouse did not start")
        return process

    async def _keep_lighthouse(self) -> None:
        """Start the lighthouse again whenever it ends; training does not wait for it."""
        while self._lighthouse is not None:
            code = await self._lighthouse.wait()
            logger.info("the lighthouse ended with %s: starting it again", code)
            await asyncio.sleep(_RESTART_S)
            self._lighthouse = await self._start_lighthouse()
            # Usually the same as before, unless somebody took its port meanwhile.
            self.url = self._run_dir.read_address()
            if self.relay is not None:
                self.relay.url = self.url

    async def _serve_forks(self) -> None:
        """Start the fork server and follow what it says."""
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._settings.threads)}
        # In a session of its own: Ctrl-C is the agent's business, also while the fork server imports torch.
        self._fork_server = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "craft.agent.forkserver", str(theirs.fileno()), str(os.getpid()),
            pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL, env=environment, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        reader, self._fork_writer = await asyncio.open_connection(sock=ours)
        while line := await reader.readline():
            message = msgspec.json.decode(line, type=Outgoing)
            if isinstance(message, Ready):
                self._forks_ready.set()
            elif isinstance(message, Forked):
                self._living[message.worker_id] = message.pid
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
        for index in range(self._settings.workers):
            request = self._fork_request(index)
            self._fork_writer.write(msgspec.json.encode(request) + b"\n")
        self._started = self._settings.workers

    def _fork_request(self, index: int) -> Fork:
        worker_id = f"{self._settings.worker_prefix}{index}"
        folder = self._run_dir.worker(worker_id)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        worker = self._settings.worker_settings(worker_id, index, str(self._socket_path), self._run_dir.path)
        environment = {
            "RANK": str(index),
            "LOCAL_RANK": str(index),
            "WORLD_SIZE": str(self._settings.workers),
            "OMP_NUM_THREADS": str(self._settings.threads),
            **worker.to_environment(),
        }
        return Fork(
            worker_id=worker_id,
            script=self._settings.script,
            arguments=self._settings.arguments,
            as_module=self._settings.as_module,
            environment=environment,
            log=str(self._run_dir.log(worker_id)),
        )

    def _ended(self, message: Ended) -> None:
        self._living.pop(message.worker_id, None)
        if self._over.done() and message.exit_code != 0:
            self._failed.add(message.worker_id)
        assert self.relay is not None
        self.relay.ended(
            Exited(
                worker_id=message.worker_id,
                exit_code=message.exit_code,
                signal=message.signal,
                time=message.time,
            )
        )
        if self._started and not self._living:
            self._all_ended.set()

    def _directed(self, directive: Directive) -> None:
        for worker_id in directive.fenced:
            if worker_id in self._living:
                self._signal(worker_id, signal.SIGKILL)
        if directive.stopping:
            self._finish(Outcome(exit_code=directive.exit_code, reason=directive.reason, traceback=directive.traceback))

    def _signal(self, worker_id: str, number: signal.Signals) -> None:
        try:
            os.kill(self._living[worker_id], number)
        except ProcessLookupError:
            return

    async def _tick(self) -> None:
        while True:
            self._watch(self)
            await asyncio.sleep(0.1)

    async def _see_out(self, outcome: Outcome) -> Outcome:
        """The job is over: let workers come to the end of their scripts after a good end; else end them."""
        if outcome.exit_code == 0:
            ended = asyncio.ensure_future(self._all_ended.wait())
            either: set[asyncio.Future[Any]] = {ended, self._interrupted}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            outcome = self._interrupted.result() if self._interrupted.done() else self._after_training(outcome)
        if self._living:
            await self._end_workers()
        self._watch(self)
        return outcome

    def _after_training(self, outcome: Outcome) -> Outcome:
        """What a script does after its last step may fail, too."""
        assert self.relay is not None
        failed = next((report.failed for report in self.relay.reports().values() if report.failed is not None), None)
        if failed is None or failed.worker_id not in self._failed:
            return outcome
        reason = f"{failed.error} (worker {failed.worker_id}, after the last step)"
        return Outcome(exit_code=1, reason=reason, traceback=failed.traceback)

    async def _end_workers(self) -> None:
        """Ask them to end, and after a while do not ask."""
        for worker_id in list(self._living):
            self._signal(worker_id, signal.SIGTERM)
        try:
            await asyncio.wait_for(self._all_ended.wait(), _LEAVE_S)
        except asyncio.TimeoutError:
            for worker_id in list(self._living):
                self._signal(worker_id, signal.SIGKILL)

    async def _end_helpers(self) -> None:
        if self._fork_writer is not None:
            self._fork_writer.close()
        if self._fork_server is not None:
            if self._fork_server.returncode is None and not self._forks_ready.is_set():
                # It has no workers yet, and would first import torch to the end.
                self._fork_server.kill()
            await self._fork_server.wait()
        if self._lighthouse is not None and self._lighthouse.returncode is None:
            self._lighthouse.terminate()
            await self._lighthouse.wait()


def supervise(settings: RunSettings, run_dir: RunDir, watch: Callable[[Supervisor], None]) -> Outcome:
    """Run the job on this host from beginning to end."""

    async def go() -> Outcome:
        return await Supervisor(settings, run_dir, watch).run()

    return asyncio.run(go())
