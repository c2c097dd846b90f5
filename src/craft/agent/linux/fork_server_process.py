"""The agent's side of one fork server: start its process, read its messages, end it.

``ForkServerKeeper`` runs one at a time and starts another when it ends. Its workers end with it: the kernel kills them.
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
from craft.agent.linux.syscalls import kill_group
from craft.settings.run import RunSettings

_LOOK_S = 0.01


class ForkServerProcess:
    """One fork server process. Lives on the agent's event loop."""

    def __init__(self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._process = process
        self._reader = reader
        self.writer = writer
        """Carries fork requests to it."""
        self._is_ready = False

    @classmethod
    async def start(cls, settings: RunSettings) -> ForkServerProcess:
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(settings.threads),
            # The order of a set of strings depends on it, and results may depend on that: one value for all workers and runs.
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED") or "0",
        }
        try:
            # In a separate session: the agent handles Ctrl-C, also while the fork server imports torch.
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
        """Yield its messages until it ends."""
        try:
            # A killed fork server may leave an incomplete line.
            while (line := await self._reader.readline()).endswith(b"\n"):
                message = msgspec.json.decode(line, type=Outgoing)
                self._is_ready = self._is_ready or isinstance(message, Ready)
                yield message
        except ConnectionResetError:
            # It ended with unread requests.
            return

    async def end(self) -> None:
        """End it, with all its workers."""
        self.writer.close()
        if self._process.returncode is None and not self._is_ready:
            # It has no workers yet, and would first finish importing torch.
            self._process.kill()
        await self._process.wait()


async def gone(pids: Iterable[int]) -> None:
    """Kill workers of an ended fork server and their process groups; wait until the workers are gone."""
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            kill_group(pid)
            continue
        try:
            # The kernel is about to do the same, since their parent died.
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            while not poller.poll(0):
                await asyncio.sleep(_LOOK_S)
        except ProcessLookupError:
            pass
        finally:
            os.close(pidfd)
        kill_group(pid)
