"""A lighthouse process, and WebSocket clients that play its agents: what tests of the lighthouse share."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from craft.protocol.membership import Member
from craft.protocol.messages import Directive, Exited, HostReport, WorkerReport
from craft.settings.rundir import RunDir
from craft.wire.auth import bearer, read_token
from craft.wire.client import Client
from craft.wire.codec import decode, encode

LIMIT_S = 20.0
COMMAND = "import sys; from craft.cli.lighthouse import lighthouse; sys.exit(lighthouse())"


def start(run: RunDir, *options: str, workers: int = 2) -> subprocess.Popen[str]:
    """Start a lighthouse; it may still fail to."""
    command = [sys.executable, "-c", COMMAND, "--workers", str(workers), "--dir", str(run.path), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


class Scene:
    """Lighthouses on one run directory; all are ended when the test ends."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.processes: list[subprocess.Popen[str]] = []

    def light(self, *options: str, workers: int = 2) -> subprocess.Popen[str]:
        """Start a lighthouse and wait until it listens."""
        process = start(self.run, *options, workers=workers)
        self.processes.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("lighthouse listening on http://127.0.0.1:"), process.communicate()
        return process

    def refused(self, *options: str) -> str:
        """Start a lighthouse that must not come up; returns what it says."""
        process = start(self.run, *options)
        out, err = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, out) == (2, "")
        assert "Traceback" not in err
        return err

    @property
    def client(self) -> Client:
        return Client.of_run(self.run)

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


class Agent:
    """The lighthouse's view of an agent: a WebSocket that sends reports and gets directives."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse[bool], host: str, pid: int) -> None:
        self.socket = socket
        self.host = host
        self.pid = pid
        self.sequence = 0

    async def report(
        self, *workers: WorkerReport, exited: tuple[Exited, ...] = (), sequence: int | None = None
    ) -> None:
        self.sequence = self.sequence + 1 if sequence is None else sequence
        report = HostReport(host=self.host, pid=self.pid, sequence=self.sequence, workers=workers, exited=exited)
        await self.socket.send_str(encode(report).decode())

    async def directive(self, wanted: Callable[[Directive], bool] = lambda _: True) -> Directive:
        """Return the next directive that is as wanted."""
        while True:
            frame = await asyncio.wait_for(self.socket.receive(), LIMIT_S)
            message = decode(frame.data)
            assert isinstance(message, Directive)
            if wanted(message):
                return message

    async def closed(self) -> tuple[int | None, str]:
        """Wait for the lighthouse to end the connection; returns its code and reason."""
        while True:
            message = await asyncio.wait_for(self.socket.receive(), LIMIT_S)
            if message.type is aiohttp.WSMsgType.CLOSE:
                return message.data, str(message.extra)
            if message.type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.ERROR):
                return self.socket.close_code, str(message.extra)


class Cast:
    """Opens connections of agents to the lighthouse of a run."""

    def __init__(self, scene: Scene, session: aiohttp.ClientSession) -> None:
        self.scene = scene
        self._session = session
        self._agents: list[Agent] = []

    async def agent(self, host: str = "a", pid: int = 1) -> Agent:
        url = self.scene.run.read_address()
        agent = Agent(await self._session.ws_connect(f"{url}/v1/agent"), host, pid)
        self._agents.append(agent)
        return agent

    async def end(self) -> None:
        for agent in self._agents:
            await agent.socket.close()


def play(scene: Scene, story: Callable[[Cast], Awaitable[None]]) -> None:
    async def main() -> None:
        async with aiohttp.ClientSession(headers=bearer(read_token(scene.run.token))) as session:
            cast = Cast(scene, session)
            try:
                await story(cast)
            finally:
                await cast.end()

    asyncio.run(main())


def worker(name: str, generation: int = 0, **more: Any) -> WorkerReport:
    return WorkerReport(member=Member(worker_id=name), pid=os.getpid(), joined=True, generation=generation, **more)


def killed(name: str) -> Exited:
    return Exited(worker_id=name, exit_code=None, signal=9, time=time.time())


def at(number: int) -> Callable[[Directive], bool]:
    return lambda directive: directive.generation is not None and directive.generation.number == number


def members(directive: Directive) -> tuple[str, ...]:
    assert directive.generation is not None
    return directive.generation.worker_ids


async def beats(agent: Agent, *workers: WorkerReport) -> None:
    """Be heard until cancelled."""
    while True:
        await agent.report(*workers)
        await asyncio.sleep(0.05)


def follow_until(scene: Scene, event: str) -> dict[str, Any]:
    """Wait for a line of the journal."""
    for line in scene.client.events(follow=True):
        if line.get("event") == event:
            return line
    raise AssertionError(f"the lighthouse ended without {event}")
