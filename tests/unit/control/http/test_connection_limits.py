"""The door of a lighthouse, before a server that only counts, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from craft.control.agents.token_bucket import TokenBucket
from craft.control.http.connection_limits import ConnectionBounds, ConnectionLimits
from craft.control.http.request_log import RequestLog

LIMIT_S = 10.0


class Behind(asyncio.Protocol):
    """A server that says back what it hears."""

    made = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        Behind.made += 1
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Scene:
    def __init__(self, gate: ConnectionLimits, port: int) -> None:
        self.gate = gate
        self.made: list[asyncio.BaseTransport] = []
        self._port = port
        self._streams: list[Streams] = []

    async def connect(self) -> Streams:
        streams = await asyncio.open_connection("127.0.0.1", self._port)
        self._streams.append(streams)
        return streams

    async def end(self) -> None:
        for _, writer in self._streams:
            writer.close()


async def answers(streams: Streams) -> bool:
    """Whether somebody is behind the door for this connection."""
    reader, writer = streams
    try:
        writer.write(b"x")
        return await asyncio.wait_for(reader.read(1), LIMIT_S) == b"x"
    except ConnectionError:
        return False


async def ended(streams: Streams) -> bool:
    """Wait for the other side to end the connection."""
    try:
        return await asyncio.wait_for(streams[0].read(1), LIMIT_S) == b""
    except ConnectionError:
        return True


def play(limits: ConnectionBounds, story: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        gate = ConnectionLimits(limits, RequestLog())
        Behind.made = 0
        server = await asyncio.get_running_loop().create_server(lambda: gate.protocol(Behind), "127.0.0.1", 0)
        scene = Scene(gate, server.sockets[0].getsockname()[1])
        await story(scene)
        await scene.end()
        gate.close()
        server.close()
        await server.wait_closed()

    asyncio.run(main())


def transports(gate: ConnectionLimits) -> list[asyncio.BaseTransport]:
    return list(gate._strangers)


def test_a_stranger_that_shows_no_token_is_sent_away_though_it_speaks() -> None:
    async def story(scene: Scene) -> None:
        talker, silent = await scene.connect(), await scene.connect()
        assert await answers(talker)
        assert await ended(talker)
        assert await ended(silent)

    play(ConnectionBounds(stay_s=0.2), story)


def test_whoever_was_admitted_may_stay() -> None:
    async def story(scene: Scene) -> None:
        agent = await scene.connect()
        assert await answers(agent)
        for transport in transports(scene.gate):
            scene.gate.admit(transport)
        stranger = await scene.connect()
        assert await ended(stranger)
        assert await answers(agent)

    play(ConnectionBounds(stay_s=0.2), story)


def test_one_more_stranger_sends_the_oldest_away_and_nobody_who_was_admitted() -> None:
    async def story(scene: Scene) -> None:
        agent = await scene.connect()
        assert await answers(agent)
        for transport in transports(scene.gate):
            scene.gate.admit(transport)
        strangers = []
        for _ in range(5):
            strangers.append(await scene.connect())
            assert await answers(strangers[-1])
        assert [await ended(each) for each in strangers[:2]] == [True, True]
        assert all([await answers(each) for each in (agent, *strangers[2:])])

    play(ConnectionBounds(per_address=3), story)
    play(ConnectionBounds(strangers=3), story)


def test_when_there_is_no_room_at_all_the_newcomer_is_turned_away() -> None:
    async def story(scene: Scene) -> None:
        first, second = await scene.connect(), await scene.connect()
        assert await answers(first)
        assert await answers(second)
        assert await ended(await scene.connect())
        first[1].close()
        await first[1].wait_closed()
        while not await answers(await scene.connect()):
            pass
        assert await answers(second)

    play(ConnectionBounds(connections=2), story)


def test_nothing_is_made_for_a_stranger_that_says_nothing() -> None:
    async def story(scene: Scene) -> None:
        for _ in range(20):
            await scene.connect()
        assert await answers(await scene.connect())
        assert Behind.made == 1

    play(ConnectionBounds(), story)


def test_limits_fit_into_the_files_that_a_process_may_open() -> None:
    for files in (64, 256, 1024, 20_000, 10**6):
        limits = ConnectionBounds().within(files)
        assert 0 < limits.per_address <= limits.strangers < limits.connections < files


def test_a_bucket_lets_a_burst_pass_and_then_its_rate() -> None:
    bucket = TokenBucket(rate=10.0, burst=20.0, now=0.0)
    assert [bucket.take(1.0, 0.0) for _ in range(20)] == [0.0] * 20
    assert bucket.take(1.0, 0.0) == 0.1
    assert bucket.take(1.0, 0.1) == 0.1
    assert bucket.take(1.0, 10.0) == 0.0
