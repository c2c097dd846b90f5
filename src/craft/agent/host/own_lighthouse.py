"""Run the lighthouse of ``craft run`` as a process; restart it when it ends or is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable

from craft.agent.host.retry import retry
from craft.agent.linux import procfs
from craft.decide.detect.hangs import STOPPED
from craft.protocol.errors import ConfigError, Unreachable
from craft.protocol.messages import ending
from craft.settings.files.private_files import append_private
from craft.settings.run import RunSettings
from craft.settings.rundir import START_ANEW, HeldRunDir, RunDir

logger = logging.getLogger(__name__)

_START_S = 60.0
_RESTART_S = 0.1
_RESTART_LIMIT_S = 30.0
_OWN_HOST_LIMIT_S = 10.0
_LAST_WORDS_S = 1.0
_END_S = 5.0
_LOOK_S = 0.25
_STOP_LIMIT_S = 1.0
_AT_ONCE = 1 << 16
_FOR_PEOPLE = "craft lighthouse: "


class OwnLighthouse:
    """Starts, restarts and ends the lighthouse process. Lives on the agent's event loop."""

    def __init__(self, settings: RunSettings, run_dir: RunDir, held: HeldRunDir) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._held = held
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self._said = b""
        """The last part of the current process's standard error."""
        self._told = ""
        self._wanted = True

    async def start(self) -> None:
        """Start it, and return once it listens; raise ConfigError with its error output if it fails."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            raise ConfigError(f"the system gives no process for the lighthouse: {error.strerror or error}") from None
        assert process.stdout is not None and process.stderr is not None
        self._said = b""
        self._listening = asyncio.create_task(self._listen(process.stderr))
        try:
            line = await asyncio.wait_for(process.stdout.readline(), _START_S)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()
            raise ConfigError(f"the lighthouse did not listen within {_START_S:g} s of its start") from None
        if not line:
            code = await process.wait()
            await self._listening
            said = self._said.decode(errors="replace").strip().removeprefix(_FOR_PEOPLE)
            raise ConfigError(said or f"the lighthouse did not start: {ending(code)}, and it did not say why")
        self._process = process

    async def _listen(self, stream: asyncio.StreamReader) -> None:
        """Append its standard error to its log; log lines for people here, too: the log's disk may be full."""
        half = unwritten = b""
        while data := await stream.read(_AT_ONCE):
            self._said = (self._said + data)[-_AT_ONCE:]
            unwritten = self._keep(unwritten + data)
            *lines, half = (half + data).split(b"\n")
            for line in lines if self._process is not None else ():
                text = line.decode(errors="replace")
                if text.startswith(_FOR_PEOPLE) and text != self._told:
                    self._told = text
                    logger.error("%s", text)
        self._keep(unwritten)

    def _keep(self, data: bytes) -> bytes:
        """Append ``data`` to the lighthouse's log; return what was not written, for the next attempt."""
        with contextlib.suppress(OSError), open(append_private(self._run_dir.lighthouse_log), "ab") as file:
            file.write(data)
            return b""
        return data[-_AT_ONCE:]

    def _command(self) -> list[str]:
        settings = self._settings
        command = [sys.executable, "-m", "craft.cli.main", "lighthouse", "--with-parent", "--keep"]
        command += ["--dir", str(self._run_dir.path), "--workers", str(settings.workers)]
        command += ["--min-workers", str(settings.min_workers)]
        if settings.workers_per_replica > 1:
            command += ["--workers-per-replica", str(settings.workers_per_replica)]
        # With one host, no other one can go on: silence of a busy machine must not end the job.
        command += ["--port", str(settings.port), "--heartbeat-limit", str(_OWN_HOST_LIMIT_S)]
        # The effective settings: the user's file may change before a restart.
        command += ["--config", str(self._run_dir.config)]
        if settings.chaos:
            command.append("--chaos")
        if settings.token_file is not None:
            command += ["--token-file", str(settings.token_file)]
        return command

    async def keep(self, on_start: Callable[[], None]) -> None:
        """Restart it whenever it ends; training does not wait for it."""
        while True:
            assert self._process is not None
            code = await self._see_through(self._process)
            if not self._wanted:
                return
            logger.info("the lighthouse ended (%s): starting it again", ending(code))
            await self._start_again()
            on_start()

    async def _see_through(self, process: asyncio.subprocess.Process) -> int:
        """Wait for its end; kill it if a signal stopped it. Its keeper (``control/respawn``) does so for the serving process."""
        ended = asyncio.ensure_future(process.wait())
        stopped = 0
        while not (await asyncio.wait((ended,), timeout=_LOOK_S))[0]:
            stopped = stopped + 1 if procfs.state(process.pid) == STOPPED else 0
            if stopped == round(_STOP_LIMIT_S / _LOOK_S) and self._wanted:
                logger.warning("the lighthouse was stopped by a signal: it is killed, and started again")
                process.kill()
        return ended.result()

    async def _start_again(self) -> None:
        """Retry the start for a while: the old process may still be ending, or a disk may be full for a moment."""

        async def start() -> None:
            if trouble := self._held.trouble():
                raise Unreachable(f"{trouble}, and the lighthouse cannot go on without it. {START_ANEW}")
            await self.start()

        def log(error: Exception) -> None:
            logger.warning("the lighthouse does not start, and is tried again: %s", error)

        await asyncio.sleep(_RESTART_S)
        try:
            await retry(start, ConfigError, limit_s=_RESTART_LIMIT_S, every_s=_RESTART_S, failed=log)
        except ConfigError as error:
            raise Unreachable(f"the lighthouse cannot be started again: {error}") from None

    async def end(self) -> None:
        self._wanted = False
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), _END_S)
            except asyncio.TimeoutError:
                # A signal stopped it, or it waits for a disk.
                self._process.kill()
                await self._process.wait()
        if self._listening is not None:
            # Its last lines may still be in the pipe.
            await asyncio.wait((self._listening,), timeout=_LAST_WORDS_S)
