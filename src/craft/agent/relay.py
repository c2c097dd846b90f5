"""Between workers and lighthouse: reports up, directives down. Keeps the latest of each, and sends it again on reconnect."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

import aiohttp
from msgspec.structs import replace

from craft.protocol.errors import ConfigError, MalformedMessage, Unauthorized
from craft.protocol.messages import Directive, Exited, HostReport, WorkerReport
from craft.wire import codec
from craft.wire.auth import bearer

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.1
_RECONNECT_S = 0.2


class Relay:
    """Lives on the agent's event loop."""

    def __init__(self, host: str, url: str, token: str, on_directive: Callable[[Directive], None]) -> None:
        self.report = HostReport(host=host, pid=os.getpid(), sequence=0)
        self.directive: Directive | None = None
        self.connected = asyncio.Event()
        self.url = url
        self._token = token
        self._on_directive = on_directive
        self._changed = asyncio.Event()
        self._workers: dict[str, asyncio.StreamWriter] = {}

    def reports(self) -> dict[str, WorkerReport]:
        return {report.member.worker_id: report for report in self.report.workers}

    def ended(self, exited: Exited) -> None:
        """A worker's process ended; the lighthouse hears of it at once."""
        self._workers.pop(exited.worker_id, None)
        self._update(exited=(*self.report.exited, exited))

    async def serve_worker(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take one worker's reports; called by the Unix server for each connection."""
        worker_id = None
        try:
            while True:
                size = codec.frame_size(await reader.readexactly(codec.HEADER_BYTES))
                message = codec.decode(await reader.readexactly(size))
                if not isinstance(message, WorkerReport):
                    raise MalformedMessage(f"a worker sent a {type(message).__qualname__}")
                if worker_id is None:
                    worker_id = message.member.worker_id
                    self._workers[worker_id] = writer
                    if self.directive is not None:
                        writer.write(codec.frame(self.directive))
                self._update(workers=tuple({**self.reports(), worker_id: message}.values()))
        except (asyncio.IncompleteReadError, ConnectionError):
            # Its process ended; the fork server says how.
            return
        except MalformedMessage as error:
            logger.warning("worker %s: %s", worker_id or "?", error)
        finally:
            writer.close()

    def _update(self, **changes: object) -> None:
        self.report = replace(self.report, sequence=self.report.sequence + 1, **changes)
        self._changed.set()

    async def follow_lighthouse(self) -> None:
        """Keep a connection to the lighthouse; it may go away and come back."""
        async with aiohttp.ClientSession(headers=bearer(self._token)) as session:
            while True:
                try:
                    async with session.ws_connect(
                        f"{self.url}/v1/agent", max_msg_size=codec.MAX_MESSAGE_BYTES, autoping=True
                    ) as connection:
                        self.connected.set()
                        await self._converse(connection)
                except aiohttp.WSServerHandshakeError as error:
                    if error.status in (401, 403):
                        raise Unauthorized(f"the lighthouse at {self.url} does not accept our token") from None
                    logger.warning("the lighthouse at %s answers %s", self.url, error.status)
                except (aiohttp.ClientError, OSError) as error:
                    logger.info("the lighthouse at %s is out of reach: %s", self.url, error)
                await asyncio.sleep(_RECONNECT_S)

    async def _converse(self, connection: aiohttp.ClientWebSocketResponse[Any]) -> None:
        sending = asyncio.create_task(self._send_reports(connection))
        try:
            while True:
                message = await connection.receive()
                if message.type == aiohttp.WSMsgType.CLOSE and message.data == aiohttp.WSCloseCode.POLICY_VIOLATION:
                    raise ConfigError(f"the lighthouse at {self.url} refuses this agent: {message.extra}")
                if message.type != aiohttp.WSMsgType.TEXT:
                    break
                directive = codec.decode(message.data)
                if isinstance(directive, Directive):
                    self._pass_on(directive)
        except MalformedMessage as error:
            logger.warning("the lighthouse sent rubbish: %s", error)
        finally:
            sending.cancel()

    async def _send_reports(self, connection: aiohttp.ClientWebSocketResponse[Any]) -> None:
        try:
            while True:
                self._changed.clear()
                await connection.send_str(codec.encode(self.report).decode())
                try:
                    await asyncio.wait_for(self._changed.wait(), HEARTBEAT_S)
                except asyncio.TimeoutError:
                    self.report = replace(self.report, sequence=self.report.sequence + 1)
        except (ConnectionError, aiohttp.ClientError):
            # The receiving side sees the same and reconnects.
            return

    def _pass_on(self, directive: Directive) -> None:
        self.directive = directive
        data = codec.frame(directive)
        for writer in self._workers.values():
            writer.write(data)
        self._on_directive(directive)
