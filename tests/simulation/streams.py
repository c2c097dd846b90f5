"""Byte streams between simulated processes: Unix sockets, and the pipes of child processes.

One end is asyncio's, for production code that reads a ``StreamReader``; the other end is the simulation's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from .clock import KERNEL, SimulatedLoop

_DELAY_S = 0.0002


class Far:
    """The simulation's end of a stream."""

    def __init__(self, loop: SimulatedLoop, protocol: asyncio.Protocol, hear: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._protocol = protocol
        self._hear = hear
        self.closed = False
        self.near = Near(self)

    def open(self) -> None:
        self._protocol.connection_made(self.near)

    def send(self, data: bytes) -> None:
        """Bytes to the production code; they arrive in order."""
        if not self.closed:
            self._loop.call_later(_DELAY_S, self._arrive, data, context=KERNEL)

    def close(self) -> None:
        """This end hangs up: the other one reads what is on its way, and then the end."""
        if not self.closed:
            self.closed = True
            self._loop.call_later(_DELAY_S, self._hang_up, context=KERNEL)

    def _arrive(self, data: bytes) -> None:
        if not self.near.is_closing():
            self._protocol.data_received(data)

    def _hang_up(self) -> None:
        if not self.near.is_closing():
            self.near.lost = True
            self._protocol.eof_received()
            self._protocol.connection_lost(None)

    def taken(self, data: bytes) -> None:
        """Bytes of the production code, on their way here."""
        if not self.closed:
            self._loop.call_later(_DELAY_S, self._heard, data, context=KERNEL)

    def _heard(self, data: bytes) -> None:
        if not self.closed:
            self._hear(data)

    def near_closed(self) -> None:
        self.closed = True
        self._loop.call_soon(self._protocol.connection_lost, None, context=KERNEL)
        self._loop.call_soon(self._hear, b"", context=KERNEL)


class Near(asyncio.Transport):
    """Asyncio's end of a stream."""

    def __init__(self, far: Far) -> None:
        super().__init__()
        self._far = far
        self.lost = False

    def write(self, data: Any) -> None:
        self._far.taken(bytes(data))

    def close(self) -> None:
        if not self.lost:
            self.lost = True
            self._far.near_closed()

    def is_closing(self) -> bool:
        return self.lost


class UnixServer:
    """What ``asyncio.start_unix_server`` returns."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close

    async def __aenter__(self) -> UnixServer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()
