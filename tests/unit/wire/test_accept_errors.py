"""Servers that the system gives no connection say so once, and serve who waited when it does again."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.system_calls import Rule, failing

from craft.wire import accept_errors
from craft.wire.accept_errors import AcceptErrors
from craft.wire.peer_server import PeerServer

LIMIT_S = 30.0


def words(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("error", ["EMFILE", "ENOBUFS"])
def test_a_server_of_asyncio_says_once_that_it_takes_no_connections_and_when_it_does_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    monkeypatch.setattr(accept_errors, "_OVER_S", 1.5)

    async def serve() -> None:
        asyncio.get_running_loop().set_exception_handler(AcceptErrors("the agent"))
        server = await asyncio.start_unix_server(lambda _, writer: writer.close(), path=str(tmp_path / "socket"))
        with failing(tmp_path / "switch", Rule("accept", error)) as switch:
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "socket"))
            # asyncio tries again every second.
            await until(lambda: len({int(each["time"]) for each in switch.struck("accept")}) > 2)
            switch.set()
            assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
        writer.close()
        await until(lambda: len(words(caplog)) > 1)
        server.close()

    asyncio.run(serve())
    first, second = words(caplog)
    assert first.startswith("the agent cannot accept connections: ") and "ulimit -n" in first
    assert second == "the agent accepts connections again"


def test_other_errors_of_an_event_loop_are_told_as_before(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(AcceptErrors("the agent"))
        loop.call_soon(lambda: int("nothing"))
        await asyncio.sleep(0.01)

    asyncio.run(fail())
    assert "invalid literal for int" in caplog.text


@pytest.mark.parametrize("error", ["EMFILE", "ECONNABORTED", "EPERM", "EINTR"])
def test_a_peer_server_says_once_that_it_takes_no_connections(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: str
) -> None:
    with failing(tmp_path / "switch", Rule("accept", error, times=4)):
        server = PeerServer("127.0.0.1", bytes(32), lambda peer: None, name="store", max_strangers=4, max_peers=4)
        with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as connection:
            # Its challenge: the connection was taken in the end.
            assert connection.recv(1)
        server.close()
    first, second = words(caplog)
    assert first.startswith("the store cannot accept connections, and retries: ") and "ulimit -n" in first
    assert second == "the store accepts connections again"
