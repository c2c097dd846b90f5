"""The lighthouse that ``craft run`` starts by itself, as a process of its own, and again whenever it ends."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable

from craft.protocol.errors import ConfigError
from craft.settings.run import RunSettings
from craft.settings.rundir import RunDir

logger = logging.getLogger(__name__)

_START_S = 60.0
_RESTART_S = 0.1
_RESTART_LIMIT_S = 30.0
_OWN_HOST_LIMIT_S = 10.0


class OwnLighthouse:
    """Lives on the agent's event loop."""

    def __init__(self, settings: RunSettings, run_dir: RunDir) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it; returns when it listens. Raises ConfigError with what it said if it does not."""
        with self._run_dir.lighthouse_log.open("ab") as log:
            before = log.tell()
            process = await asyncio.create_subprocess_exec(
                *self._command(), stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True
            )
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), _START_S)
        if not line:
            await process.wait()
            said = self._run_dir.lighthouse_log.read_bytes()[before:].decode(errors="replace").strip()
            raise ConfigError(said.removeprefix("craft lighthouse: ") or "the lighthouse did not start")
        self._process = process

    def _command(self) -> list[str]:
        settings = self._settings
        command = [sys.executable, "-m", "craft.cli.main", "lighthouse", "--with-parent", "--keep"]
        command += ["--dir", str(self._run_dir.path), "--workers", str(settings.workers)]
        command += ["--min-workers", str(settings.min_workers)]
        # With one host there is nobody to go on without it: silence of a busy machine must not end the job.
        command += ["--port", str(settings.port), "--heartbeat-limit", str(_OWN_HOST_LIMIT_S)]
        # The effective settings: the file that the user named may change before this is started again.
        command += ["--config", str(self._run_dir.config)]
        if settings.chaos:
            command.append("--chaos")
        if settings.token_file is not None:
            command += ["--token-file", str(settings.token_file)]
        return command

    async def keep(self, on_start: Callable[[], None]) -> None:
        """Start it again whenever it ends; training does not wait for it."""
        while True:
            assert self._process is not None
            code = await self._process.wait()
            logger.info("the lighthouse ended with %s: starting it again", code)
            await self._start_again()
            on_start()

    async def _start_again(self) -> None:
        """What kept it from starting may pass: the one before may still be ending, a disk may be full for a moment."""
        deadline = time.monotonic() + _RESTART_LIMIT_S
        while True:
            await asyncio.sleep(_RESTART_S)
            try:
                return await self.start()
            except ConfigError as error:
                if time.monotonic() > deadline:
                    raise
                logger.warning("the lighthouse does not start, and is tried again: %s", error)

    async def end(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()
