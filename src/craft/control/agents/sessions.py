"""Messages in: one WebSocket per agent, with its reports, and the directives back.

An invalid message ends its connection (code 1008, with the reason) and changes nothing else. An agent that sends too
much is read more slowly; one that connects and sends nothing is disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Protocol

from aiohttp import WSCloseCode, WSMessage, WSMsgType, web

from craft.control.agents.dispatch import Dispatch
from craft.control.agents.heartbeat import Heartbeats
from craft.control.agents.heartbeat_interval import limit_for, pace_for
from craft.control.agents.inspection import Inspections
from craft.control.agents.token_bucket import TokenBucket
from craft.control.core.loop import Loop
from craft.protocol.errors import MalformedMessage
from craft.protocol.heartbeats import Heartbeat
from craft.protocol.messages import HostReport
from craft.protocol.values.inspection import Looked
from craft.wire.codec import MAX_MESSAGE_BYTES, unpack

logger = logging.getLogger(__name__)

MAX_REASON_BYTES = 120
"""A close frame holds 123 bytes."""
CLOSE_LIMIT_S = 0.5
FIRST_REPORT_LIMIT_S = 5.0
MESSAGES_PER_S = 500.0
"""An agent of a small job with many workers may reach a hundred; a burst of four seconds' worth passes freely."""
BYTES_PER_S = 4 * 1024.0 * 1024.0
_BURST_S = 4.0


class Socket(Protocol):
    """The part of a WebSocket that is used here."""

    @property
    def closed(self) -> bool: ...

    async def receive(self) -> WSMessage: ...

    async def send_str(self, data: str) -> None: ...

    async def send_bytes(self, data: bytes) -> None: ...

    async def close(self, *, code: int = ..., message: bytes = ...) -> bool: ...


class Session:
    """One connection of one agent."""

    def __init__(self, socket: Socket) -> None:
        self.socket = socket
        self.host = ""
        self.pid = 0
        self.sequence = -1
        now = time.monotonic()
        self._messages = TokenBucket(MESSAGES_PER_S, _BURST_S * MESSAGES_PER_S, now)
        self._bytes = TokenBucket(BYTES_PER_S, _BURST_S * BYTES_PER_S, now)

    def pause_s(self, size: int) -> float:
        """Return how long not to read after a message of this size."""
        now = time.monotonic()
        return max(self._messages.take(1.0, now), self._bytes.take(size, now))

    @property
    def closed(self) -> bool:
        return self.socket.closed

    async def say(self, data: str) -> None:
        await self.socket.send_str(data)


class Sessions:
    """The connections of all agents."""

    def __init__(self, loop: Loop, dispatch: Dispatch, heartbeats: Heartbeats) -> None:
        self._loop = loop
        self._dispatch = dispatch
        self._heartbeats = heartbeats
        self._limit_s = heartbeats.limit_s
        self._open: set[Session] = set()
        self._tasks: set[asyncio.Task[bool]] = set()
        self.by_host: dict[str, Session] = {}
        """The newest connection of each host, open or closed."""
        self.inspections = Inspections(loop, lambda: self.by_host)

    async def run(self, request: web.Request) -> web.WebSocketResponse:
        """Serve one agent until its connection ends."""
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, compress=False, timeout=CLOSE_LIMIT_S)
        await socket.prepare(request)
        await self.serve(socket)
        return socket

    async def serve(self, socket: Socket) -> None:
        """Serve one agent on an open connection until it ends."""
        session = Session(socket)
        self._open.add(session)
        self._set_pace()
        sender = asyncio.create_task(self._send(socket))
        try:
            await self._receive(session)
        finally:
            self._open.discard(session)
            self._set_pace()
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def close(self) -> None:
        """Close every connection: this lighthouse goes away."""
        closing = (session.socket.close(code=WSCloseCode.GOING_AWAY, message=b"stopped") for session in self._open)
        await asyncio.gather(*closing, return_exceptions=True)

    def _set_pace(self) -> None:
        pace = pace_for(len(self._open), self._dispatch.pace)
        self._dispatch.set_pace(pace)
        self._heartbeats.limit_s = limit_for(self._limit_s, pace)

    async def _send(self, socket: Socket) -> None:
        async def send(data: str | bytes) -> None:
            await (socket.send_str(data) if isinstance(data, str) else socket.send_bytes(data))

        # The receiving side notices a connection that ends during a send.
        with contextlib.suppress(ConnectionError):
            await self._dispatch.serve(send)

    async def _receive(self, session: Session) -> None:
        while True:
            try:
                # After its first report an agent may be silent for as long as its heartbeats allow.
                message = await asyncio.wait_for(
                    session.socket.receive(), None if session.host else FIRST_REPORT_LIMIT_S
                )
            except asyncio.TimeoutError:
                await session.socket.close(code=WSCloseCode.TRY_AGAIN_LATER, message=b"no report came")
                return
            if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                return
            try:
                self._take(session, message.data)
            except MalformedMessage as error:
                logger.warning("agent of host %s: %s", session.host or "unknown", error)
                await session.socket.close(code=WSCloseCode.POLICY_VIOLATION, message=_short(error))
                return
            except Exception:
                # The edge of this connection's task: other agents and the job go on.
                logger.exception("a report of host %s could not be handled", session.host)
                await session.socket.close(code=WSCloseCode.INTERNAL_ERROR, message=b"see the lighthouse's log")
                return
            pause_s = session.pause_s(len(message.data))
            if pause_s:
                await asyncio.sleep(pause_s)

    def _take(self, session: Session, data: bytes | str) -> None:
        report = unpack(data)
        if isinstance(report, Heartbeat):
            self._beat(session)
            return
        if isinstance(report, Looked) and session.host:
            self.inspections.took(session.host, report)
            return
        if not isinstance(report, HostReport):
            raise MalformedMessage(f"an agent sends HostReport, not {type(report).__name__}", "$.type")
        if not session.host:
            self._introduce(session, report)
        if report.host != session.host or report.pid != session.pid:
            raise MalformedMessage("host and pid must stay the same on one connection", "$.host")
        if self.by_host[session.host] is not session:
            return
        self._heartbeats.heard(session.host)
        # Late or repeated: a newer report replaced it. It still is a sign of life.
        if report.sequence > session.sequence:
            session.sequence = report.sequence
            self._loop.handle_report(report)

    def _beat(self, session: Session) -> None:
        if not session.host:
            raise MalformedMessage("an agent begins with a HostReport", "$.type")
        if self.by_host[session.host] is session:
            self._heartbeats.heard(session.host)

    def _introduce(self, session: Session, report: HostReport) -> None:
        other = self.by_host.get(report.host)
        if other is not None and not other.closed:
            if other.pid != report.pid and not self._heartbeats.is_silent(report.host):
                raise MalformedMessage(f"host {report.host} has an agent already (pid {other.pid})", "$.host")
            # The agent reconnected: ignore what is left of its old connection.
            closing = other.socket.close(code=WSCloseCode.OK, message=b"a newer connection took over")
            task = asyncio.create_task(closing)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        session.host, session.pid = report.host, report.pid
        self.by_host[report.host] = session


def _short(error: MalformedMessage) -> bytes:
    """Return the field and the message, cut to the size of a close frame."""
    text = str(error) if not error.field or error.field in str(error) else f"{error.field}: {error}"
    return text.encode()[:MAX_REASON_BYTES].decode(errors="ignore").encode()
