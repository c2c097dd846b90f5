"""A real lighthouse process, with real WebSocket clients for agents: killed, silenced and confused for real."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import click
import pytest
from click.testing import CliRunner

from craft.cli import inspect
from craft.protocol.errors import ConfigError, Unauthorized, Unreachable
from craft.protocol.membership import Member
from craft.protocol.messages import Directive, Exited, HostReport, WorkerReport
from craft.settings.rundir import RunDir
from craft.telemetry.journal import read_lines
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


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(RunDir(tmp_path / "run"))
    yield scene
    scene.end()


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


def test_a_lost_worker_leads_to_a_new_generation_for_all_hosts_at_once(scene: Scene) -> None:
    scene.light("--heartbeat-limit", "30")

    async def story(cast: Cast) -> None:
        first, second = await cast.agent("a", 1), await cast.agent("b", 2)
        await first.report(worker("w0"))
        await second.report(worker("w1"))
        for agent in (first, second):
            assert members(await agent.directive(at(1))) == ("w0", "w1")
        await first.report(worker("w0", 1, step=3))
        began = time.perf_counter()
        await second.report(worker("w1", 1), exited=(killed("w1"),))
        directive = await first.directive(at(2))
        assert time.perf_counter() - began < 1.0
        # Its agent saw it end: nobody has to be told to end it.
        assert (members(directive), directive.fenced) == (("w0",), ())
        assert await second.directive(at(2)) == directive

    play(scene, story)
    status = scene.client.get_status()
    assert (status["generation"], status["faults"], status["step"]) == (2, 1, 3)
    assert status["fault_list"][0]["reason"] == "killed by SIGKILL"


def test_reports_that_are_repeated_late_or_reordered_do_no_harm(scene: Scene) -> None:
    scene.light("--heartbeat-limit", "30")

    async def story(cast: Cast) -> None:
        agent = await cast.agent()
        await agent.report(worker("w0"), worker("w1"))
        await agent.directive(at(1))
        gone = (killed("w1"),)
        await agent.report(worker("w0", 1), worker("w1", 1), exited=gone, sequence=9)
        await agent.report(worker("w0", 1), worker("w1", 1), exited=gone, sequence=9)
        await agent.report(worker("w0", 0), worker("w1", 0), sequence=2)
        await agent.directive(at(2))
        # A connection that comes back says everything again.
        again = await cast.agent()
        await again.report(worker("w0", 2), exited=gone)
        assert members(await again.directive()) == ("w0",)
        assert (await agent.closed())[0] == 1000

    play(scene, story)
    names = [line["event"] for line in scene.client.events() if line["kind"] == "event"]
    assert names.count("WorkerLost") == 1
    assert names.count("WorkerJoined") == 2


@pytest.mark.parametrize("way", ["silent", "closed"])
def test_a_host_that_is_not_heard_is_lost_after_the_limit_P5(scene: Scene, way: str) -> None:
    scene.light("--heartbeat-limit", "0.3")

    async def story(cast: Cast) -> None:
        living, dying = await cast.agent("a", 1), await cast.agent("b", 2)
        await dying.report(worker("w1"))
        if way == "closed":
            await dying.socket.close()
        beat = asyncio.create_task(beats(living, worker("w0")))
        directive = await living.directive(at(2))
        beat.cancel()
        assert (members(directive), directive.fenced) == (("w0",), ("w1",))

    play(scene, story)
    lost = [line for line in read_lines(scene.run.journal) if line.get("event") == "HostLost"]
    assert [line["host"] for line in lost][:1] == ["b"]
    assert ("closed" in lost[0]["reason"]) == (way == "closed")


BAD_MESSAGES = [
    ("{", ""),
    ("[1]", ""),
    ('{"type":"HostReport","host":"b","pid":"x","sequence":1}', "$.pid"),
    ('{"type":"Directive","sequence":1}', "$.type"),
    ('{"type":"HostReport","host":"","pid":2,"sequence":1}', "$.host"),
    ('{"type":"HostReport","host":"a","pid":2,"sequence":1}', "has an agent already"),
]


def test_a_bad_message_ends_its_own_connection_and_nothing_else_P6(scene: Scene) -> None:
    scene.light("--heartbeat-limit", "30", workers=1)

    async def story(cast: Cast) -> None:
        good = await cast.agent("a", 1)
        await good.report(worker("w0"))
        directive = await good.directive(at(1))
        for text, named in BAD_MESSAGES:
            bad = await cast.agent("b", 2)
            await bad.socket.send_str(text)
            code, reason = await bad.closed()
            assert code == 1008
            assert named in reason
        large = await cast.agent("b", 2)
        with contextlib.suppress(ConnectionError):
            await large.socket.send_str(" " * (5 * 1024 * 1024))
        assert (await large.closed())[0] in (1009, 1006)
        await good.report(worker("w0", 1), exited=(killed("w0"),))
        assert (await good.directive(lambda told: told.sequence > directive.sequence)).stopping

    play(scene, story)


def test_a_killed_lighthouse_comes_back_with_growing_generations_P3(scene: Scene) -> None:
    first = scene.light("--heartbeat-limit", "30")
    address, token = scene.run.read_address(), read_token(scene.run.token)
    told: list[Directive] = []

    async def before(cast: Cast) -> None:
        agent = await cast.agent()
        await agent.report(worker("w0"), worker("w1"))
        await agent.directive(at(1))
        await agent.report(worker("w0", 1), worker("w1", 1), exited=(killed("w1"),))
        told.append(await agent.directive(at(2)))

    async def after(cast: Cast) -> None:
        agent = await cast.agent()
        adopted = await agent.directive()
        assert adopted.generation == told[0].generation
        assert adopted.sequence > told[0].sequence
        await agent.report(worker("w0", 2), worker("w2"), exited=(killed("w1"),))
        proposed = await agent.directive(lambda directive: directive.upcoming is not None)
        assert proposed.upcoming is not None
        assert proposed.upcoming.number == 3

    play(scene, before)
    first.send_signal(signal.SIGKILL)
    first.wait()
    scene.light("--heartbeat-limit", "30")
    assert (scene.run.read_address(), read_token(scene.run.token)) == (address, token)
    play(scene, after)
    assert scene.client.get_status()["faults"] == 1


def test_a_host_that_does_not_come_back_to_a_restarted_lighthouse_is_lost_once_another_one_is_back(
    scene: Scene,
) -> None:
    first = scene.light("--heartbeat-limit", "30")

    async def before(cast: Cast) -> None:
        for agent, name in ((await cast.agent("a", 1), "w0"), (await cast.agent("b", 2), "w1")):
            await agent.report(worker(name))
        await agent.directive(at(1))

    async def after(cast: Cast) -> None:
        back = await cast.agent("b", 2)
        beat = asyncio.create_task(beats(back, worker("w1", 1)))
        assert members(await back.directive(at(2))) == ("w1",)
        beat.cancel()

    play(scene, before)
    first.kill()
    first.wait()
    scene.light("--heartbeat-limit", "0.2")
    play(scene, after)
    assert [line["host"] for line in scene.client.events() if line.get("event") == "HostLost"] == ["a"]


def test_a_lighthouse_that_hears_nobody_declares_nobody_lost(scene: Scene) -> None:
    scene.light("--heartbeat-limit", "0.2")

    async def story(cast: Cast) -> None:
        first, second = await cast.agent("a", 1), await cast.agent("b", 2)
        await first.report(worker("w0"))
        await second.report(worker("w1"))
        await first.directive(at(1))
        await asyncio.to_thread(follow_until, scene, "LighthouseAlone")
        await second.report(worker("w1", 1))
        await asyncio.to_thread(follow_until, scene, "LighthouseHeard")
        await first.report(worker("w0", 1))
        status = await asyncio.to_thread(scene.client.get_status)
        assert (status["generation"], status["faults"]) == (1, 0)

    play(scene, story)


def test_a_lighthouse_that_cannot_make_a_generation_durable_tells_nobody_and_ends_P3(scene: Scene) -> None:
    process = scene.light("--heartbeat-limit", "30", workers=1)

    async def story(cast: Cast) -> None:
        agent = await cast.agent()
        scene.run.path.rename(scene.run.path.with_name("moved"))
        await agent.report(worker("w0"))
        assert (await agent.closed())[0] in (1001, 1006, 1011)

    play(scene, story)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "cannot make a generation durable" in err


def test_a_second_lighthouse_on_the_same_run_directory_is_refused(scene: Scene) -> None:
    first = scene.light()
    message = scene.refused()
    assert f"pid {first.pid}" in message
    assert scene.client.get_status()["lighthouse"]["pid"] == first.pid


def test_a_port_in_use_is_named(scene: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is in use" in scene.refused("--port", str(port))


def test_the_run_directory_is_private_and_sigterm_ends_cleanly(scene: Scene) -> None:
    process = scene.light()
    assert scene.run.path.stat().st_mode & 0o777 == 0o700
    assert scene.run.token.stat().st_mode & 0o777 == 0o600
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""


def test_events_are_streamed_as_they_happen(scene: Scene) -> None:
    process = scene.light("--heartbeat-limit", "30", workers=1)
    stream = scene.client.events(follow=True)
    assert next(stream)["event"] == "LighthouseStarted"

    async def story(cast: Cast) -> None:
        agent = await cast.agent()
        await agent.report(worker("w0"))
        await agent.directive(at(1))

    play(scene, story)
    assert [next(stream)[name] for name in ("event", "action")] == ["WorkerJoined", "Reconfigure"]
    assert len(list(scene.client.events())) == 3
    process.send_signal(signal.SIGTERM)
    assert list(stream) == []
    assert process.wait(LIMIT_S) == 0


def test_the_client_says_what_is_wrong(scene: Scene) -> None:
    process = scene.light()
    with pytest.raises(Unauthorized, match="--dir"):
        Client(scene.run.read_address(), "wrong" * 5).get_status()
    with pytest.raises(ConfigError, match="no worker 'w7'"):
        scene.client.report_failure(worker_id="w7")
    assert scene.client.stop("enough")["already"] is False
    assert scene.client.get_status()["reason"] == "enough"
    process.send_signal(signal.SIGTERM)
    process.wait(LIMIT_S)
    with pytest.raises(Unreachable, match="no lighthouse answers"):
        scene.client.get_status()


def test_a_lighthouse_ends_with_its_parent(scene: Scene) -> None:
    nested = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {COMMAND!r}, *sys.argv[1:]]).wait()"
    command = [sys.executable, "-c", nested, "--workers", "1", "--dir", str(scene.run.path), "--with-parent"]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    scene.processes.append(parent)
    assert parent.stdout is not None
    assert parent.stdout.readline().startswith("lighthouse listening")
    parent.kill()
    # Its end of the pipe closes when it ends, and not before.
    assert parent.stdout.read() == ""
    with pytest.raises(Unreachable):
        scene.client.get_status()


def craft(command: click.Command, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(command, list(arguments))
    return result.exit_code, result.output


def test_the_command_line_shows_a_job_and_acts_on_it(scene: Scene) -> None:
    scene.light("--heartbeat-limit", "30")

    async def story(cast: Cast) -> None:
        agent = await cast.agent()
        await agent.report(worker("w0", metrics={"loss": 0.25}), worker("w1"))
        await agent.directive(at(1))

    play(scene, story)
    run = ("--dir", str(scene.run.path))
    code, text = craft(inspect.status, *run)
    assert (code, "running: step 0, generation 1" in text, "loss 0.25" in text) == (0, True, True)
    code, text = craft(inspect.status, *run, "--json")
    assert (code, json.loads(text)["generation"]) == (0, 1)
    code, text = craft(inspect.fail, "w1", *run, "--reason", "smoke")
    assert (code, text.startswith("worker w1 is out")) == (0, True)
    assert craft(inspect.fail, "w1", *run) == (0, "worker w1 was gone already\n")
    assert craft(inspect.fail, "w8", *run) == (2, "craft: there is no worker 'w8'\n")
    code, text = craft(inspect.events, *run)
    assert (code, "WorkerLost" in text, "smoke" in text) == (0, True, True)
    assert craft(inspect.stop, *run) == (0, "the job ends after the step in flight\n")


def test_the_command_line_explains_that_nothing_is_running(scene: Scene, tmp_path: Path) -> None:
    code, text = craft(inspect.status, "--dir", str(tmp_path / "nothing"))
    assert (code, "craft run" in text) == (2, True)
    scene.light().send_signal(signal.SIGTERM)
    scene.processes[0].wait(LIMIT_S)
    run = ("--dir", str(scene.run.path))
    code, text = craft(inspect.status, *run)
    assert (code, "no lighthouse answers" in text) == (2, True)
    code, text = craft(inspect.events, *run)
    assert (code, "LighthouseStarted" in text) == (0, True)
