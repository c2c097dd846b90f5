"""Relay reports from workers to the lighthouse, and directives back; resend the latest on reconnect.

The lighthouse sets the pace (``Pace``). In a job of few hosts the agent reports every change at once and every heartbeat is
a report; in a large one mere progress waits, and most heartbeats are empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

import aiohttp
from msgspec.structs import replace

from craft.protocol.errors import ConfigError, MalformedMessage, Unauthorized
from craft.protocol.events import WorkerOverdue
from craft.protocol.heartbeats import Heartbeat, Pace, Update
from craft.protocol.messages import Directive, Exited, HostPart, HostReport, PreemptionOrder, WorkerReport
from craft.protocol.values.inspection import Collectives, Look, Looked, Stacks
from craft.wire import codec
from craft.wire.auth import bearer
from craft.wire.deltas import updated
from craft.wire.tls import explain

logger = logging.getLogger(__name__)

_RECONNECT_S = 0.2
_SAID_S = 60.0
"""Reports repeat the end of a worker for this long."""
_TOGETHER_S = 0.02
"""Mere progress within this time goes into one report, so that many workers do not cause one each."""
_CONNECT_LIMIT_S = 1.0
_HANDSHAKE_LIMIT_S = 10.0
"""If a lighthouse accepts a connection and does not answer within this, the agent reconnects."""
_UNANSWERED_LIMIT_MS = 2000
"""Without a TCP acknowledgement for this long, the agent reconnects: TCP's own retries back off, and would notice late
that the network works again."""


class Relay:
    """Connects this host's workers to the lighthouse. Lives on the agent's event loop."""

    def __init__(
        self,
        host: str,
        url: str,
        token: str,
        on_directive: Callable[[Directive], None],
        tls: ssl.SSLContext | None = None,
        session: Callable[..., Any] = aiohttp.ClientSession,
    ) -> None:
        self.report = HostReport(host=host, pid=os.getpid(), sequence=0)
        self.directive: Directive | None = None
        self.connected = asyncio.Event()
        self.url = url
        self._token = token
        self._tls = tls
        self._session = session
        self._on_directive = on_directive
        self._changed = asyncio.Event()
        self._pace = Pace()
        self._urgent = 0
        """Sequence of the newest report that must not wait."""
        self._soon: asyncio.TimerHandle | None = None
        self._connection: aiohttp.ClientWebSocketResponse[Any] | None = None
        self.on_look: Callable[[Look], None] = lambda _: None
        """Called when the lighthouse asks to inspect workers."""
        self.on_told: Callable[[Collectives | Stacks], None] = lambda _: None
        """Called with a worker's answer to an inspection."""
        self._workers: dict[str, asyncio.StreamWriter] = {}
        self._listening: dict[str, asyncio.Task[Any]] = {}
        """By worker, the task that reads its reports until its connection closes."""
        self._found: dict[str, WorkerOverdue] = {}
        self._phases: dict[str, str] = {}
        self._away_since: float | None = time.monotonic()
        """When the connection to the lighthouse was lost; None while connected."""

    def reports(self) -> dict[str, WorkerReport]:
        return {report.member.worker_id: report for report in self.report.workers}

    def unwritten(self) -> str:
        """Return why a live worker cannot record its steps; empty if all can."""
        ended = {each.worker_id for each in self.report.exited}
        living = (report for report in self.report.workers if report.member.worker_id not in ended)
        return next((report.unwritten for report in living if report.unwritten), "")

    def carried_bytes(self) -> int:
        """Return how much memory a joining worker should reserve; 0 while no worker here knows."""
        return max((report.carried_bytes for report in self.report.workers), default=0)

    def ended(self, exited: Exited) -> None:
        """Report the end of a worker's process to the lighthouse at once."""
        for known in (self._workers, self._listening, self._found, self._phases):
            known.pop(exited.worker_id, None)
        kept = self._still_worth_saying()
        gone = {each.worker_id for each in self.report.exited} - {each.worker_id for each in kept}
        workers = tuple(report for report in self.report.workers if report.member.worker_id not in gone)
        self._update(exited=(*kept, exited), workers=workers)

    def _still_worth_saying(self) -> tuple[Exited, ...]:
        """Return the ends that a lighthouse may not know yet: all while disconnected, else recent ones."""
        if self.silent_s() > 0:
            return self.report.exited
        return tuple(each for each in self.report.exited if time.time() - each.time < _SAID_S)

    def silent_s(self) -> float:
        """Return how long the lighthouse has been disconnected; 0 while connected."""
        return 0.0 if self._away_since is None else time.monotonic() - self._away_since

    def say(self, **changes: str | float | PreemptionOrder | HostPart | None) -> None:
        """Change fields of this host's report."""
        self._update(True, **changes)

    def found(self, worker_id: str, overdue: WorkerOverdue | None) -> None:
        """Take the watchdog's finding about a worker; None clears it."""
        if overdue is not None:
            self._found[worker_id] = overdue
        elif self._found.pop(worker_id, None) is None:
            return
        if worker_id in self.reports():
            self.take(self.reports()[worker_id])

    def doing(self, phases: dict[str, str]) -> None:
        """Put what each worker is doing into the next report."""
        if phases != self._phases:
            self._phases = phases
            self._update(urgent=False, workers=tuple(map(self._seen, self.report.workers)))

    def _seen(self, report: WorkerReport) -> WorkerReport:
        """Return a worker's report, with this agent's findings about it."""
        worker_id = report.member.worker_id
        return replace(report, phase=self._phases.get(worker_id, ""), overdue=self._found.get(worker_id))

    async def serve_worker(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read one worker's reports; the Unix server calls this for each connection."""
        worker_id = None
        try:
            while True:
                size = codec.frame_size(await reader.readexactly(codec.HEADER_BYTES))
                message = codec.decode(await reader.readexactly(size))
                if isinstance(message, Collectives | Stacks) and worker_id is not None:
                    self.on_told(replace(message, worker_id=worker_id))
                    continue
                if not isinstance(message, WorkerReport):
                    raise MalformedMessage(f"a worker sent a {type(message).__qualname__}")
                if worker_id is None:
                    worker_id = message.member.worker_id
                    self._workers[worker_id] = writer
                    self._listening[worker_id] = asyncio.current_task()  # type: ignore[assignment]
                    if self.directive is not None:
                        writer.write(codec.frame(self.directive))
                self.take(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            # Its process ended; the fork server reports how.
            return
        except MalformedMessage as error:
            logger.warning("worker %s: %s", worker_id or "?", error)
        finally:
            writer.close()

    async def hear_out(self, worker_id: str, limit_s: float) -> None:
        """Wait until all reports of an ended worker are read, at most ``limit_s``.

        A process that it forked may still hold its connection open.
        """
        listening = self._listening.pop(worker_id, None)
        if listening is not None:
            await asyncio.wait({listening}, timeout=limit_s)

    def ask_worker(self, worker_id: str, look: Look) -> bool:
        """Send a worker a question; return False if it is not connected."""
        writer = self._workers.get(worker_id)
        if writer is None:
            return False
        writer.write(codec.frame(look))
        return True

    async def send(self, message: Looked) -> None:
        """Send an answer, if the lighthouse is still connected."""
        if self._connection is not None:
            with contextlib.suppress(ConnectionError, aiohttp.ClientError):
                data = codec.pack(message)
                await (self._connection.send_str(data) if isinstance(data, str) else self._connection.send_bytes(data))

    def take(self, report: WorkerReport) -> None:
        """Put a worker's report into this host's report."""
        known = self.reports()
        before = known.get(report.member.worker_id)
        report = known[report.member.worker_id] = self._seen(report)
        self._update(
            urgent=before is None or _but_progress(before) != _but_progress(report), workers=tuple(known.values())
        )

    def _update(self, urgent: bool = True, **changes: object) -> None:
        self.report = replace(self.report, sequence=self.report.sequence + 1, **changes)
        if urgent:
            self._send_now()
        elif not self._pace.progress_s and self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(_TOGETHER_S, self._send_now)

    def _send_now(self) -> None:
        """Send the current report without delay."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        self._urgent = self.report.sequence
        self._changed.set()

    async def follow_lighthouse(self) -> None:
        """Keep a connection to the lighthouse, and reconnect whenever it is lost."""
        limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_LIMIT_S)
        async with self._session(headers=bearer(self._token), timeout=limits) as session:
            while True:
                try:
                    async with await asyncio.wait_for(self._greet(session), _HANDSHAKE_LIMIT_S) as connection:
                        self.connected.set()
                        self._away_since = None
                        await self._converse(connection)
                except aiohttp.WSServerHandshakeError as error:
                    if error.status in (401, 403):
                        raise Unauthorized(f"the lighthouse at {self.url} does not accept our token") from None
                    logger.warning("the lighthouse at %s answers %s", self.url, error.status)
                except asyncio.TimeoutError:
                    # It may have ended just then, or be stopped: its host's kernel accepts connections for it.
                    logger.info("the lighthouse at %s did not answer within %g s", self.url, _HANDSHAKE_LIMIT_S)
                except (aiohttp.ClientError, OSError) as error:
                    logger.info("the lighthouse at %s is out of reach: %s", self.url, explain(error, self.url) or error)
                self._away_since = self._away_since or time.monotonic()
                await asyncio.sleep(_RECONNECT_S)

    async def _greet(self, session: aiohttp.ClientSession) -> aiohttp.ClientWebSocketResponse[Any]:
        return await session.ws_connect(
            f"{self.url}/v1/agent", max_msg_size=codec.MAX_MESSAGE_BYTES, autoping=True, ssl=self._tls or True
        )

    async def _converse(self, connection: aiohttp.ClientWebSocketResponse[Any]) -> None:
        wire = connection.get_extra_info("socket")
        if wire is not None:
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_LIMIT_MS)
        self._pace = Pace()
        self._connection = connection
        sending = asyncio.create_task(self._send_reports(connection))
        said: Directive | None = None
        try:
            while True:
                message = await connection.receive()
                if message.type == aiohttp.WSMsgType.CLOSE and message.data == aiohttp.WSCloseCode.POLICY_VIOLATION:
                    raise ConfigError(f"the lighthouse at {self.url} refuses this agent: {message.extra}")
                if message.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                    break
                heard = self.decode(said, message.data)
                if isinstance(heard, Look):
                    self.on_look(heard)
                said = self._hear(heard) or said
        except MalformedMessage as error:
            logger.warning("the lighthouse sent an invalid message: %s", error)
        finally:
            self._connection = None
            sending.cancel()

    def decode(self, said: Directive | None, data: str | bytes) -> codec.Message:
        """Decode a frame; ``said`` is the directive that came before it on the same connection."""
        message = codec.unpack(data)
        return updated(said, message) if isinstance(message, Update) else message

    def _hear(self, message: codec.Message) -> Directive | None:
        if isinstance(message, Pace):
            self._pace = message
            self._changed.set()
        if not isinstance(message, Directive):
            return None
        self._pass_on(message)
        return message

    async def _send_reports(self, connection: aiohttp.ClientWebSocketResponse[Any]) -> None:
        sent, when = -1, 0.0
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._changed.clear()
                if self._urgent > sent or time.monotonic() - when >= self._pace.progress_s:
                    if self.report.sequence == sent:
                        self.report = replace(self.report, sequence=sent + 1)
                    sent, when = self.report.sequence, time.monotonic()
                    await connection.send_str(codec.encode(self.report).decode())
                else:
                    await connection.send_str(codec.encode(Heartbeat(sequence=sent)).decode())
                # Cheaper than wait_for, which creates a task for every heartbeat.
                timer = loop.call_later(self._pace.heartbeat_s, self._changed.set)
                await self._changed.wait()
                timer.cancel()
        except (ConnectionError, aiohttp.ClientError):
            # The receiving task sees the same error and reconnects.
            return

    def _pass_on(self, directive: Directive) -> None:
        self.directive = directive
        if self._workers:
            data = codec.frame(directive)
            for writer in self._workers.values():
                writer.write(data)
        self._on_directive(directive)


def _but_progress(report: WorkerReport) -> WorkerReport:
    """Return the report without fields that change all the time and trigger nothing."""
    return replace(report, sequence=0, step=0, metrics={}, step_s=0.0, times=None, phase="")
