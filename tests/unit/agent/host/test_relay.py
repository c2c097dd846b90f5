"""The relay of an agent against a lighthouse that says what a test wants, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from craft.agent.host import relay
from craft.agent.host.relay import Relay
from craft.protocol.heartbeats import Heartbeat, Pace
from craft.protocol.membership import Generation, Member
from craft.protocol.messages import Directive, Exited, HostReport, WorkerReport
from craft.wire.codec import encode, pack, unpack
from craft.wire.deltas import difference

LIMIT_S = 10.0


class Scripted:
    """The other end: keeps what the relay says, and says what it is told to."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[Any] = asyncio.Queue()
        self.connections: asyncio.Queue[web.WebSocketResponse] = asyncio.Queue()

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        await self.connections.put(connection)
        async for message in connection:
            await self.heard.put(unpack(message.data))
        return connection

    async def next(self, wanted: Callable[[Any], bool] = lambda _: True) -> Any:
        """The next message that is as wanted."""
        while True:
            message = await asyncio.wait_for(self.heard.get(), LIMIT_S)
            if wanted(message):
                return message

    async def connection(self) -> web.WebSocketResponse:
        return await asyncio.wait_for(self.connections.get(), LIMIT_S)


class Scene:
    """A relay that follows a scripted lighthouse."""

    def __init__(self, relay: Relay, lighthouse: Scripted, directives: asyncio.Queue[Directive]) -> None:
        self.relay = relay
        self.lighthouse = lighthouse
        self._directives = directives

    async def directive(self) -> Directive:
        return await asyncio.wait_for(self._directives.get(), LIMIT_S)


def play(story: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        lighthouse = Scripted()
        app = web.Application()
        app.router.add_get("/v1/agent", lighthouse.serve)
        directives: asyncio.Queue[Directive] = asyncio.Queue()
        async with TestServer(app) as server:
            relay = Relay("a", str(server.make_url("")).rstrip("/"), "token", directives.put_nowait)
            following = asyncio.create_task(relay.follow_lighthouse())
            await story(Scene(relay, lighthouse, directives))
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    asyncio.run(main())


def worker(name: str = "w0", **more: Any) -> WorkerReport:
    return WorkerReport(member=Member(worker_id=name), pid=1, **more)


def is_report(message: msgspec.Struct) -> bool:
    return isinstance(message, HostReport)


def generation(number: int, *names: str) -> Generation:
    return Generation(number=number, nonce="x", members=tuple(Member(worker_id=name) for name in names))


def test_in_a_small_job_every_change_and_every_heartbeat_is_a_whole_report() -> None:
    async def story(scene: Scene) -> None:
        for step in range(3):
            scene.relay.take(worker(step=step))
            report = await scene.lighthouse.next(lambda said: bool(said.workers) and said.workers[0].step == step)  # noqa: B023
            assert is_report(report)
        before = report.sequence
        assert [(await scene.lighthouse.next()).sequence for _ in range(3)] == [before + 1, before + 2, before + 3]

    play(story)


def test_told_so_the_relay_keeps_mere_progress_back_and_sends_bare_heartbeats() -> None:
    async def story(scene: Scene) -> None:
        connection = await scene.lighthouse.connection()
        scene.relay.take(worker(step=1))
        await scene.lighthouse.next(lambda said: bool(said.workers))
        await connection.send_str(encode(Pace(heartbeat_s=0.02, progress_s=30.0)).decode())
        beat = await scene.lighthouse.next(lambda said: isinstance(said, Heartbeat))
        scene.relay.take(worker(step=2, metrics={"loss": 1.0}, step_s=0.1))
        for _ in range(5):
            assert await scene.lighthouse.next() == beat
        # What others must act on does not wait, and takes the progress along.
        scene.relay.take(worker(step=3, generation=2))
        report = await scene.lighthouse.next(is_report)
        assert (report.workers[0].step, report.workers[0].generation) == (3, 2)
        scene.relay.ended(Exited(worker_id="w0", exit_code=None, signal=9, time=0.0))
        report = await scene.lighthouse.next(is_report)
        assert report.exited[0].worker_id == "w0"
        assert (await scene.lighthouse.next()).sequence == report.sequence

    play(story)


def test_a_report_that_waits_is_sent_after_the_time_that_the_pace_allows() -> None:
    async def story(scene: Scene) -> None:
        connection = await scene.lighthouse.connection()
        await connection.send_str(encode(Pace(heartbeat_s=0.02, progress_s=0.1)).decode())
        scene.relay.take(worker(step=1))
        await scene.lighthouse.next(lambda said: isinstance(said, Heartbeat))
        scene.relay.take(worker(step=2))
        report = await scene.lighthouse.next(lambda said: is_report(said) and said.workers[0].step == 2)
        # And again, though nothing changed: a lighthouse may see the same report with other eyes later.
        assert (await scene.lighthouse.next(is_report)).sequence == report.sequence + 1

    play(story)


def test_updates_become_whole_directives_again() -> None:
    async def story(scene: Scene) -> None:
        connection = await scene.lighthouse.connection()
        first = Directive(sequence=1, generation=generation(1, "w0", "w1"))
        second = Directive(sequence=2, generation=generation(2, "w0"), fenced=("w1",))
        update = difference(first, second)
        assert update is not None
        await connection.send_str(encode(first).decode())
        await connection.send_str(encode(update).decode())
        assert [await scene.directive(), await scene.directive()] == [first, second]

    play(story)


def test_a_packed_directive_is_unpacked() -> None:
    async def story(scene: Scene) -> None:
        connection = await scene.lighthouse.connection()
        large = Directive(sequence=1, reason="x" * 100_000)
        await connection.send_bytes(pack(large))  # type: ignore[arg-type]
        assert await scene.directive() == large

    play(story)


def test_after_an_update_of_something_it_never_got_the_relay_connects_anew_and_says_everything_again() -> None:
    async def story(scene: Scene) -> None:
        connection = await scene.lighthouse.connection()
        await connection.send_str(encode(Pace(heartbeat_s=0.02, progress_s=30.0)).decode())
        await scene.lighthouse.next(lambda said: isinstance(said, Heartbeat))
        base = Directive(sequence=1, generation=generation(1, "w0"))
        update = difference(base, Directive(sequence=2, generation=generation(1, "w0"), stopping=True))
        assert update is not None
        await connection.send_str(encode(update).decode())
        again = await scene.lighthouse.connection()
        assert is_report(await scene.lighthouse.next(is_report))
        await again.send_str(encode(base).decode())
        assert await scene.directive() == base

    play(story)


def test_a_lighthouse_that_takes_a_connection_and_never_answers_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is stopped, or whose host vanished just then: the agent must find it again when it answers."""
    monkeypatch.setattr(relay, "_HANDSHAKE_LIMIT_S", 0.3)

    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            loop = asyncio.get_running_loop()
            url = f"http://127.0.0.1:{server.getsockname()[1]}"
            following = asyncio.create_task(Relay("host", url, "token", lambda _: None).follow_lighthouse())
            taken = [(await asyncio.wait_for(loop.sock_accept(server), LIMIT_S))[0] for _ in range(3)]
            following.cancel()
            for connection in taken:
                connection.close()

    asyncio.run(story())
