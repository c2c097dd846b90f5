"""The agent for workers that torchrun starts: it adopts them and starts none itself.

The first worker runs it as a process; it ends after torchrun and all workers. It detects their end by their pidfds, and
asks the kernel how they ended. torchrun alone starts replacements; one that attaches after the end of the job gets its
outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import msgspec

from craft.agent.host.retry import first_of
from craft.agent.linux.forkserver import Ended
from craft.agent.linux.syscalls import how_it_ended
from craft.agent.outcome import JobOutcome
from craft.agent.supervisor import Supervisor
from craft.protocol.errors import CraftError
from craft.protocol.values.attach import Adopt, Adopted
from craft.settings.files.private_files import open_private
from craft.settings.run import RunSettings, resolve, write_effective
from craft.settings.rundir import RunDir
from craft.telemetry.text import logs
from craft.telemetry.text.plain_text import indented

logger = logging.getLogger(__name__)

How: TypeAlias = "tuple[int | None, int | None]"
"""Exit code and signal of an ended process; both None if another process reaped it first."""

_BY_ITSELF_S = 10.0
"""How long a worker has to end by itself after its script failed or the job is over."""


class TorchrunAgent(Supervisor):
    """A supervisor without a fork server: torchrun starts and reaps the workers."""

    _ends_starting = False

    def __init__(self, settings: RunSettings, run_dir: RunDir, folder: Path, torchrun_pid: int) -> None:
        super().__init__(settings, run_dir, lambda _: None)
        self._folder = folder
        self._torchrun_pid = torchrun_pid
        self._torchrun_over = asyncio.Event()

    async def _serve_workers(self) -> None:
        """Accept workers' attach requests as long as this agent runs."""
        self._follow(self._torchrun_pid, self._torchrun_ended)
        if self._found.get("exit_code") is not None:
            # The job was over before this agent started: a worker accepted now would end as if all were well.
            await asyncio.shield(self._over)
        server = await asyncio.start_unix_server(self._adopt, path=str(self._folder / "adopt"))
        async with server:
            await server.serve_forever()

    async def _start_workers(self) -> None:
        """Do nothing: torchrun starts them."""

    async def _adopt(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = msgspec.json.decode(await reader.readline(), type=Adopt)
            writer.write(msgspec.json.encode(self._answer(request)) + b"\n")
            await writer.drain()
        except (OSError, ValueError, msgspec.DecodeError) as error:
            logger.warning("rejected attach request: %s", error)
        finally:
            writer.close()

    def _answer(self, request: Adopt) -> Adopted:
        if self._over.done():
            outcome = self._over.result()
            return Adopted(reason=f"the job is over: {outcome.reason}", exit_code=outcome.exit_code)
        worker_id, environment = self.pool.adopt(request.local_rank, request.pid, late=self._has_begun())
        self._follow(request.pid, functools.partial(self._worker_ended, worker_id))
        return Adopted(environment=environment)

    def _follow(self, pid: int, ended: Callable[[How], None]) -> None:
        """Call ``ended`` when a process that is not our child ends."""
        loop = asyncio.get_running_loop()
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            loop.call_soon(ended, (None, None))
            return

        def over() -> None:
            loop.remove_reader(fd)
            how = how_it_ended(pid, fd)
            os.close(fd)
            ended(how)

        loop.add_reader(fd, over)

    def _worker_ended(self, worker_id: str, how: How) -> None:
        exit_code, signal = how
        self._ends.ended(Ended(worker_id=worker_id, exit_code=exit_code, signal=signal, time=time.time()))

    def _worker_gone(self) -> None:
        self._finish_if_all_ended()

    def _may_replace(self) -> bool:
        return False

    def _end_fenced(self, worker_id: str) -> None:
        """Give a failed worker time to end by itself: torchrun must see how it ends."""
        assert self.relay is not None
        report = self.relay.reports().get(worker_id)
        end = functools.partial(super()._end_fenced, worker_id)
        if report is not None and report.failed is not None:
            asyncio.get_running_loop().call_later(_BY_ITSELF_S, end)
        else:
            end()

    async def _end_job(self, outcome: JobOutcome) -> JobOutcome:
        await self.pool.wait(_BY_ITSELF_S)
        outcome = await super()._end_job(outcome)
        assert self.relay is not None
        if self.relay.directive is not None and self.relay.directive.stopping:
            # torchrun may restart its workers: they get the job's outcome and end with it, and so does torchrun.
            await first_of(self._torchrun_over, self._interrupted)
        return outcome

    def _torchrun_ended(self, how: How) -> None:
        self._torchrun_over.set()
        self._exhausted("torchrun has ended")
        self._finish_if_all_ended()

    def _finish_if_all_ended(self) -> None:
        if self._torchrun_over.is_set() and not self.pool.living:
            self._finish(JobOutcome(exit_code=0, reason="torchrun has ended, and its workers"))


async def _run(settings: RunSettings, run_dir: RunDir, folder: Path, torchrun_pid: int) -> JobOutcome:
    return await TorchrunAgent(settings, run_dir, folder, torchrun_pid).run()


def main() -> int:
    """Run the process. Arguments: the folder of its socket, torchrun's pid, the run directory, workers of this host."""
    folder, torchrun_pid, run_dir, workers = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    logs.begin(logging.INFO, logs.IN_FILES)
    # While this is locked, the clean-up of stale folders skips this one.
    lock = open_private(folder / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with contextlib.suppress(FileNotFoundError):
        (folder / "adopt").unlink()
    try:
        resolved = resolve({"script": "torchrun", "as_module": True, "workers": workers}, None)
        write_effective(RunDir(run_dir).config, resolved)
        outcome = asyncio.run(_run(resolved.settings, RunDir(run_dir), folder, torchrun_pid))
    except CraftError as error:
        print(indented(f"craft: {error}"), file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    logger.info("ends: %s", outcome.reason)
    return outcome.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
