"""Limit connections that have not shown the token yet, so that they cannot crowd out agents.

They have little time and are few at once; if one more comes, the oldest is closed: an agent shows its token within
milliseconds, so it always gets in. ``process`` puts the limits before the HTTP server; ``middleware`` reports which
connections showed the token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from craft.control.http.request_log import RequestLog


@dataclass(frozen=True)
class ConnectionBounds:
    """Limits of unauthenticated connections."""

    stay_s: float = 5.0
    """From the connection to a complete request with the token."""
    per_address: int = 1024
    """Many: all agents may share one address, and reconnect at the same moment."""
    strangers: int = 4096
    connections: int = 16_384
    """All connections, those with the token included. Unauthenticated ones are fewer, so agents always fit."""

    def within(self, files: int) -> ConnectionBounds:
        """Return the limits for a process that may open so many files; some are needed for other things."""
        connections = min(self.connections, max(files - 128, files // 2))
        strangers = min(self.strangers, max(1, connections // 4))
        return ConnectionBounds(self.stay_s, min(self.per_address, strangers), strangers, connections)


class ConnectionLimits:
    """Knows all connections, and which of them have not shown the token."""

    def __init__(self, limits: ConnectionBounds, log: RequestLog) -> None:
        self._limits = limits
        self._log = log
        self._open: set[_Stranger] = set()
        # Dictionaries for their order: oldest first.
        self._strangers: dict[asyncio.BaseTransport, _Stranger] = {}
        self._by_address: dict[str, dict[asyncio.BaseTransport, None]] = {}

    def protocol(self, make: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        """Return the protocol of a new connection; ``make`` makes the server's protocol."""
        return _Stranger(self, make)

    def admit(self, transport: asyncio.BaseTransport | None) -> None:
        """Record that a request on this connection had the token."""
        if transport is not None:
            guest = self._strangers.get(transport)
            if guest is not None:
                self._no_stranger(guest)

    def close(self) -> None:
        """Close unauthenticated connections; the server ends the others."""
        for guest in list(self._strangers.values()):
            guest.send_away()

    def enter(self, guest: _Stranger, transport: asyncio.Transport) -> bool:
        """Add a new connection, unauthenticated; False if there is no room."""
        if len(self._open) >= self._limits.connections:
            self._log.warning("%d connections are open: one from %s is turned away", len(self._open), guest.address)
            return False
        self._open.add(guest)
        neighbours = self._by_address.setdefault(guest.address, {})
        neighbours[transport] = None
        self._strangers[transport] = guest
        if len(neighbours) > self._limits.per_address:
            self._strangers[next(iter(neighbours))].send_away()
        elif len(self._strangers) > self._limits.strangers:
            next(iter(self._strangers.values())).send_away()
        guest.timer = asyncio.get_running_loop().call_later(self._limits.stay_s, guest.send_away)
        return True

    def leave(self, guest: _Stranger) -> None:
        """Forget a connection that ended."""
        self._open.discard(guest)
        self._no_stranger(guest)

    def _no_stranger(self, guest: _Stranger) -> None:
        if guest.timer is not None:
            guest.timer.cancel()
            guest.timer = None
        if guest.transport is None or self._strangers.pop(guest.transport, None) is None:
            return
        neighbours = self._by_address[guest.address]
        del neighbours[guest.transport]
        if not neighbours:
            del self._by_address[guest.address]


class _Stranger(asyncio.Protocol):
    """One connection. The server's protocol is made at its first byte."""

    def __init__(self, gate: ConnectionLimits, make: Callable[[], asyncio.Protocol]) -> None:
        self._gate = gate
        self._make = make
        self._inner: asyncio.Protocol | None = None
        self.transport: asyncio.Transport | None = None
        self.address = ""
        self.timer: asyncio.TimerHandle | None = None

    def send_away(self) -> None:
        """Close an unauthenticated connection at once."""
        assert self.transport is not None
        self._gate.leave(self)
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        if not self._gate.enter(self, transport):
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._inner is None:
            assert self.transport is not None
            self._inner = self._make()
            self._inner.connection_made(self.transport)
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._inner is not None else None

    def connection_lost(self, exc: Exception | None) -> None:
        self._gate.leave(self)
        if self._inner is not None:
            self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()
