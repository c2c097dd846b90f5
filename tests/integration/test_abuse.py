"""A real lighthouse under abuse: whoever floods it, hangs on it or lies to it delays no well-behaved agent (P6)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from craft.protocol.errors import Unauthorized
from craft.protocol.heartbeats import Heartbeat
from craft.protocol.membership import Member
from craft.protocol.messages import Directive, HostReport, WorkerReport
from craft.settings.rundir import RunDir
from craft.wire.auth import bearer, read_token
from craft.wire.client import Client
from craft.wire.codec import encode, unpack

LIMIT_S = 20.0
FAST_S = 0.5
"""A round trip takes some milliseconds; on a machine that is busy with everything at once, seldom more than this."""
DEBUG = (
    "import asyncio, logging, sys; logging.basicConfig(level=logging.DEBUG, stream=sys.stderr);"
    " from craft.cli.lighthouse import lighthouse; sys.exit(lighthouse())"
)


class Scene:
    """A lighthouse of a job of one worker, w0 on host good."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDir(folder / "run")
        self.errors = folder / "errors"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", DEBUG, "--workers", "1", "--dir", str(self.run.path), "--heartbeat-limit", "60"],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("lighthouse listening")
        self.url = self.run.read_address()
        self.port = int(self.url.rpartition(":")[2])
        self.token = read_token(self.run.token)
        self._sequence = itertools.count()

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), LIMIT_S, source_address=(source, 0))

    def files(self) -> int:
        """How many files the lighthouse has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    async def round_trip_s(self, session: aiohttp.ClientSession) -> float:
        """How long it takes an agent to connect, report, and be told."""
        began = time.perf_counter()
        worker = WorkerReport(member=Member(worker_id="w0"), pid=1, joined=True)
        report = HostReport(host="good", pid=1, sequence=next(self._sequence), workers=(worker,))
        async with session.ws_connect(f"{self.url}/v1/agent") as connection:
            await connection.send_str(encode(report).decode())
            while True:
                message = unpack((await connection.receive(LIMIT_S)).data)
                if isinstance(message, Directive) and message.generation is not None:
                    return time.perf_counter() - began

    def round_trips(self, enough: Callable[[int], bool]) -> list[float]:
        """Round trips one after the other, until there are enough."""

        async def go() -> list[float]:
            found: list[float] = []
            async with aiohttp.ClientSession(headers=bearer(self.token)) as session:
                while not enough(len(found)):
                    found.append(await self.round_trip_s(session))
            return found

        return asyncio.run(go())

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.communicate()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.end()


def assert_fast(took: list[float]) -> None:
    """Nearly all are; one now and then may meet a machine that is busy with something else."""
    assert sorted(took)[len(took) * 9 // 10] < FAST_S, took
    assert max(took) < 10 * FAST_S, took


def is_ended(connection: socket.socket) -> bool:
    """Wait until the other side ends the connection; what it says before does not matter."""
    connection.settimeout(LIMIT_S)
    try:
        while connection.recv(65_536):
            pass
    except ConnectionError:
        return True
    return True


CROWD = """
import contextlib, resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
kept, tried = [], 0
while tried < min(10_000, hard - 100):
    # Some are sent away while they connect.
    with contextlib.suppress(ConnectionError):
        source = (f"127.0.0.{2 + tried % 8}", 0)
        kept.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), 20, source_address=source))
    tried += 1
print(tried, flush=True)
sys.stdin.read()
"""


def test_thousands_of_silent_connections_keep_no_agent_waiting_P6(scene: Scene) -> None:
    command = [sys.executable, "-c", CROWD, str(scene.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as crowd:
        assert crowd.stdin is not None and crowd.stdout is not None
        said: list[str] = []
        reader = threading.Thread(target=lambda out: said.append(out.readline()), args=(crowd.stdout,))
        reader.start()
        meanwhile = scene.round_trips(lambda found: found >= 20 and bool(said))
        reader.join()
        files = scene.files()
        afterwards = scene.round_trips(lambda found: found >= 20)
        crowd.stdin.close()
    assert int(said[0]) > 1000
    assert_fast(meanwhile + afterwards)
    assert files < 5000


def test_requests_that_never_come_to_their_end_are_ended_P6(scene: Scene) -> None:
    token = scene.token.encode()
    beginnings = (
        b"",
        b"GET /v1/sta",
        b"GET /v1/status HTTP/1.1\r\nHost: here\r\nX-More: ",
        b"POST /v1/failures HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n\r\n{",
        b"POST /v1/failures HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer wrong\r\nContent-Length: 9999999\r\n\r\n",
        b"POST /v1/failures HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer "
        + token
        + b"\r\nContent-Length: 99\r\n\r\n{",
    )
    connections = [scene.connect() for _ in beginnings]
    for connection, beginning in zip(connections, beginnings, strict=True):
        connection.sendall(beginning)
    over = threading.Event()
    drip = threading.Thread(target=headers_for_ever, args=(scene.connect(), over))
    drip.start()
    waiting = threading.Thread(target=lambda: [is_ended(each) for each in connections])
    waiting.start()
    took = scene.round_trips(lambda found: found >= 20 and not waiting.is_alive())
    waiting.join()
    drip.join(LIMIT_S)
    assert over.is_set()
    for connection in connections:
        connection.close()
    assert_fast(took)


def headers_for_ever(connection: socket.socket, over: threading.Event) -> None:
    """One header after another, as long as they are taken."""
    deadline = time.monotonic() + LIMIT_S
    connection.sendall(b"GET /v1/status HTTP/1.1\r\nHost: here\r\n")
    with connection:
        for number in itertools.count():
            try:
                connection.sendall(b"X-%d: more\r\n" % number)
            except ConnectionError:
                over.set()
                return
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)


def test_an_agent_that_floods_is_slowed_and_no_other_one_is_P6(scene: Scene) -> None:
    bad = Flood(scene)
    bad.start()
    took = scene.round_trips(lambda found: found >= 50 and time.monotonic() - bad.began > 5.0)
    lasted = time.monotonic() - bad.began
    bad.end()
    assert_fast(took)
    # A burst, the rate for as long as it lasted, and what fits into the buffers on the way; unhindered it is far more.
    assert 2000 < bad.sent < 2000 + 500 * lasted + 10_000


class Flood(threading.Thread):
    """An agent with the token that sends heartbeats as fast as they are taken."""

    def __init__(self, scene: Scene) -> None:
        super().__init__()
        self.sent = 0
        self.began = time.monotonic()
        self._socket = scene.connect()
        self._socket.sendall(
            b"GET /v1/agent HTTP/1.1\r\nHost: here\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
            b"Authorization: Bearer " + scene.token.encode() + b"\r\n\r\n"
        )
        assert b" 101 " in self._socket.recv(4096)
        self._socket.sendall(text_frame(encode(HostReport(host="bad", pid=2, sequence=1))))
        self._socket.settimeout(None)

    def run(self) -> None:
        beat = text_frame(encode(Heartbeat(sequence=1)) + b" " * 2000)
        with contextlib.suppress(OSError):
            while True:
                # Whoever is not read any more comes to wait here.
                self._socket.sendall(beat)
                self.sent += 1

    def end(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self.join()
        self._socket.close()


def text_frame(payload: bytes) -> bytes:
    """A client's WebSocket frame, masked with zeros: its payload stays as it is."""
    return b"\x81" + struct.pack("!BH", 0x80 | 126, len(payload)) + bytes(4) + payload


def test_an_agent_that_connects_and_says_nothing_is_sent_away_P6(scene: Scene) -> None:
    async def go() -> int | None:
        async with (
            aiohttp.ClientSession(headers=bearer(scene.token)) as session,
            session.ws_connect(f"{scene.url}/v1/agent") as connection,
        ):
            message = await connection.receive(LIMIT_S)
            while message.type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                message = await connection.receive(LIMIT_S)
            return connection.close_code

    assert asyncio.run(go()) == aiohttp.WSCloseCode.TRY_AGAIN_LATER


AGENT = """
import asyncio, logging, sys
logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
from craft.agent.host.relay import Relay
from craft.protocol.membership import Member
from craft.protocol.messages import WorkerReport

async def main(url, token):
    told = asyncio.Event()
    relay = Relay("good", url, token, lambda directive: told.set())
    relay.take(WorkerReport(member=Member(worker_id="w0"), pid=1, joined=True))
    following = asyncio.create_task(relay.follow_lighthouse())
    done, _ = await asyncio.wait({following, asyncio.create_task(told.wait())}, timeout=20, return_when="FIRST_COMPLETED")
    print("told" if told.is_set() else repr(following.exception()))

asyncio.run(main(sys.argv[1], sys.stdin.readline().strip()), debug=True)
"""


UNREADABLE = (
    b"GET /v1/status HTTP/1.1\r\nAuthorization: Bearer TOKEN\r\n\x00bad\r\n\r\n",
    b"GET /v1/status HTTP/1.1\r\nAuthorization: Bearer TOKEN\x00\r\n\r\n",
    b"GET /v1/status HTTP/1.1\r\nAuthorization Bearer TOKEN\r\n\r\n",
    b"GET /v1/status HTTP/1.1\r\nAuthorization: Bearer TOKEN" + b"x" * 20_000 + b"\r\n\r\n",
    b"GET /v1/status?token=TOKEN HTTP/9\r\n\r\n",
    b"TOKEN\r\n\r\n",
)


def test_no_token_is_ever_logged_P6(scene: Scene) -> None:
    wrong = "this-token-is-wrong-but-secret"
    said = []
    for token in (scene.token, wrong):
        agent = subprocess.run(
            [sys.executable, "-c", AGENT, scene.url], input=token, capture_output=True, text=True, timeout=LIMIT_S
        )
        said.append(agent.stdout + agent.stderr)
    assert "told" in said[0]
    assert "Unauthorized" in said[1]
    with pytest.raises(Unauthorized) as refused:
        Client(scene.url, wrong).get_status()
    said.append(str(refused.value))
    Client(scene.url, scene.token).stop("enough")
    for request in UNREADABLE:
        with contextlib.suppress(ConnectionError), scene.connect() as stranger:
            stranger.sendall(request.replace(b"TOKEN", scene.token.encode()))
            is_ended(stranger)
    scene.end()
    files = [file for file in scene.run.path.rglob("*") if file.is_file() and file != scene.run.token]
    said += [file.read_text(errors="replace") for file in (scene.errors, *files)]
    assert "DEBUG" in scene.errors.read_text()
    for text in said:
        assert scene.token not in text
        assert wrong not in text
