"""The agent's end of one fork server: starts its process, says what it says, and ends it.

The supervisor has one at a time, and starts another when it ends. Its workers end with it: the kernel kills them.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterable

import msgspec

from craft.agent.linux.forkserver import Outgoing, Ready
from craft.settings.run import RunSettings

_LOOK_S = 0.01


class ForkServerProcess:
    """Lives on the agent's event loop."""

    def __init__(self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._process = process
        self._reader = reader
        self.writer = writer
        """Takes what it is to fork."""
        self._is_ready = False

    @classmethod
    async def start(cls, settings: RunSettings) -> ForkServerProcess:
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(settings.threads),
            # The order of a set of strings depends on it, and with that perhaps the bits: one for all workers and all runs.
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED") or "0",
        }
        try:
            # In a session of its own: Ctrl-C is the agent's business, also while the fork server imports torch.
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "craft.agent.linux.forkserver", str(theirs.fileno()), str(os.getpid()),
                *filter(None, map(str.strip, settings.preload.split(","))),
                pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL, env=environment, start_new_session=True,
            )  # fmt: skip
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(process, *await asyncio.open_connection(sock=ours))

    async def messages(self) -> AsyncIterator[Outgoing]:
        """What it says, until it ends."""
        try:
            # One that is killed may not have come to the end of its line.
            while (line := await self._reader.readline()).endswith(b"\n"):
                message = msgspec.json.decode(line, type=Outgoing)
                self._is_ready = self._is_ready or isinstance(message, Ready)
                yield message
        except ConnectionResetError:
            # It ended, and had not read all that was sent to it.
            return

    async def end(self) -> None:
        """Let it end, with all its workers."""
        self.writer.close()
        if self._process.returncode is None and not self._is_ready:
            # It has no workers yet, and would first import torch to the end.
            self._process.kill()
        await self._process.wait()


async def gone(pids: Iterable[int]) -> None:
    """Return when these workers of a fork server that has ended are no more, and what they had forked was told to end."""
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            _kill_group(pid)
            continue
        try:
            # The kernel is about to do the same, on behalf of the fork server.
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            while not poller.poll(0):
                await asyncio.sleep(_LOOK_S)
        except ProcessLookupError:
            pass
        finally:
            os.close(pidfd)
        _kill_group(pid)


def _kill_group(pid: int) -> None:
    """End what a worker had forked. Each worker leads a process group, whose number is not given to others meanwhile."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
