"""A worker's end of the Unix socket to its agent: one thread sends reports, another receives directives.

So a directive is handled while the main thread is blocked in an exchange, and no step waits for the agent.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from craft.protocol.errors import MalformedMessage, Unreachable
from craft.protocol.messages import Directive, WorkerReport
from craft.protocol.values.inspection import Collectives, Look, Stacks
from craft.wire import codec

logger = logging.getLogger(__name__)

_PROGRESS_INTERVAL_S = 0.1
"""Progress alone is reported at most this often; everything else at once."""


class Channel:
    """Sends the latest report, and hands every directive to ``on_directive``."""

    def __init__(
        self,
        path: str,
        report: WorkerReport,
        beat: Callable[[], None] = lambda: None,
        *,
        stacks: Callable[[Look], Stacks] | None = None,
        collectives: Callable[[Look], Collectives] | None = None,
    ) -> None:
        """``beat`` is called several times a second, by a thread that needs the GIL for it.

        ``stacks`` answers an inspection at once, before a directive that follows changes anything. ``collectives`` answers it
        on another thread, since a directive must not wait for it.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
        except OSError as error:
            raise Unreachable(f"the agent does not answer on {path}: {error}", path) from error
        # Guards the report: the main, exchange and opening threads change it, the sending thread takes it.
        self._lock = threading.Lock()
        self._report = report
        self._sent = -1
        self._urgent = threading.Event()
        self._idle = threading.Condition(self._lock)
        # Guards the handler, and keeps directives in order, one at a time.
        self._handling = threading.Lock()
        self._latest: Directive | None = None
        self._on_directive: Callable[[Directive], None] | None = None
        self._beat = beat
        self._stacks = stacks
        self._collectives = collectives
        # Guards the sending end: reports and answers come from different threads.
        self._sending = threading.Lock()
        threading.Thread(target=self._send_loop, name="craft-report", daemon=True).start()
        threading.Thread(target=self._receive_loop, name="craft-directive", daemon=True).start()

    def listen(self, on_directive: Callable[[Directive], None]) -> None:
        """Hand the latest directive to ``on_directive`` now, and later ones on the receiving thread."""
        with self._handling:
            self._on_directive = on_directive
            if self._latest is not None:
                on_directive(self._latest)

    def report(self, *, urgent: bool = True, **changes: Any) -> None:
        """Change the report; send it at once if ``urgent``, else with the next one."""
        with self._lock:
            self._report = replace(self._report, sequence=self._report.sequence + 1, **changes)
        if urgent:
            self._urgent.set()

    def flush(self, timeout_s: float = 2.0) -> None:
        """Wait until the latest report is sent."""
        self._urgent.set()
        with self._idle:
            self._idle.wait_for(lambda: self._sent >= self._report.sequence, timeout_s)

    def _send_loop(self) -> None:
        while True:
            self._urgent.wait(_PROGRESS_INTERVAL_S)
            self._urgent.clear()
            self._beat()
            with self._lock:
                report = self._report
            if report.sequence == self._sent:
                continue
            try:
                self._send(report)
            except OSError:
                return
            with self._idle:
                self._sent = report.sequence
                self._idle.notify_all()

    def _send(self, message: WorkerReport | Collectives | Stacks) -> None:
        data = codec.frame(message)
        with self._sending:
            self._socket.sendall(data)

    def _send_collectives(self, look: Look) -> None:
        assert self._collectives is not None
        try:
            self._send(self._collectives(look))
        except Exception as error:  # noqa: BLE001  (the edge of a thread: the agent continues without an answer)
            logger.warning("cannot report this worker's collectives: %s", error)

    def _receive_loop(self) -> None:
        try:
            while True:
                size = codec.frame_size(self._read(codec.HEADER_BYTES))
                message = codec.decode(self._read(size))
                if isinstance(message, Look) and self._stacks is not None:
                    self._send(self._stacks(message))
                if isinstance(message, Look) and self._collectives is not None:
                    threading.Thread(
                        target=self._send_collectives, args=(message,), name="craft-look", daemon=True
                    ).start()
                if isinstance(message, Directive):
                    with self._handling:
                        self._latest = message
                        if self._on_directive is not None:
                            self._on_directive(message)
        except (OSError, EOFError, MalformedMessage) as error:
            # Workers do not outlive their agent.
            logger.error("lost the agent (%s); exiting", error)
            logging.shutdown()
            os._exit(1)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._socket.recv(size - len(data))
            if not part:
                raise EOFError("connection closed")
            data += part
        return bytes(data)
