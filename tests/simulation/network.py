"""The network between hosts: delays, cuts, and connections that one side believes to be open.

A connection carries messages in order, like TCP. A cut loses nothing at once: what is sent waits, and arrives late if the
cut ends. The side that waits for an acknowledgement for too long gives its end up; the other side hears of it only when the
network carries again, or never. Reports of agents may also be lost, repeated or overtaken (``disorder``): the protocol says
that this does no harm.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import WSMessage, WSMsgType

from .clock import CURRENT, KERNEL, Process
from .machine import Machine

_CONNECT_S = 1.0
_APART_S = 1e-6
_UNANSWERED_S = 2.0
Accept = Callable[["End"], None]


class Network:
    """Who reaches whom, how fast, and who listens where."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.listeners: dict[str, tuple[Process, Accept]] = {}
        """Who serves on which host."""
        self.disorder = 0.0
        """The share of messages to a lighthouse that are lost, repeated or overtaken."""
        self._cut: set[frozenset[str]] = set()
        self._last: dict[tuple[str, str, str], float] = {}
        """When the last message of a line arrives."""
        self._waiting: list[Callable[[], None]] = []
        """What is to be tried again when the network carries more than it does now."""

    def carries(self, one: str, other: str) -> bool:
        return frozenset((one, other)) not in self._cut

    def cut(self, one: str, other: str) -> None:
        self._cut.add(frozenset((one, other)))

    def heal(self) -> None:
        """All hosts reach each other again; what waited is on its way."""
        self._cut.clear()
        waiting, self._waiting = self._waiting, []
        for again in waiting:
            self.machine.call_soon(again, context=KERNEL)

    def delay_s(self) -> float:
        return 0.001 + 0.004 * self.machine.random.random()

    def carry(self, one: str, other: str, arrive: Callable[[], None]) -> None:
        """Have something arrive at the kernel of ``other``: soon, or when the network carries."""
        if self.carries(one, other):
            self.machine.call_later(self.delay_s(), arrive, context=KERNEL)
        else:
            self._waiting.append(lambda: self.carry(one, other, arrive))

    def in_order(self, line: tuple[str, str, str], process: Process, take: Callable[..., None], *args: Any) -> None:
        """Have a process take something behind all that was sent before on the same ``line``, which begins at a host."""
        if self.carries(line[0], process.host):
            when = max(self.machine.now + self.delay_s(), self._last.get(line, 0.0) + _APART_S)
            self._last[line] = when
            process.later(when - self.machine.now, take, *args)
        else:
            self._waiting.append(lambda: self.in_order(line, process, take, *args))

    def session(self, host: str) -> Callable[..., Any]:
        """What an agent of ``host`` has in the place of ``aiohttp.ClientSession``."""
        return lambda **_: _Session(self, host)


class End:
    """One end of a connection; has what both of aiohttp's WebSockets have."""

    def __init__(self, network: Network, host: str, to: str, process: Process, *, patient: bool) -> None:
        """``patient``: it never gives up by itself while the network does not carry."""
        self._network = network
        self._host = host
        self._to = to
        self._patient = patient
        self.other: End
        self.closed = False
        self._arrived: deque[WSMessage] = deque()
        self._outgoing: deque[WSMessage] = deque()
        self._under_way = False
        self._blocked_since: float | None = None
        self._waiter: asyncio.Future[None] | None = None
        process.on_exit.append(self._process_ended)

    async def __aenter__(self) -> End:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def receive(self) -> WSMessage:
        while not self._arrived:
            if self.closed:
                return WSMessage(WSMsgType.CLOSED, None, None)
            self._waiter = self._network.machine.create_future()
            await self._waiter
        return self._arrived.popleft()

    async def send_str(self, data: str) -> None:
        self._send(WSMessage(WSMsgType.TEXT, data, None))

    async def send_bytes(self, data: bytes) -> None:
        self._send(WSMessage(WSMsgType.BINARY, data, None))

    async def close(self, *, code: int = 1000, message: bytes = b"") -> bool:
        if not self.closed:
            self._send(WSMessage(WSMsgType.CLOSE, code, message.decode()))
            self._shut()
        return True

    def get_extra_info(self, name: str) -> None:
        """There is no real socket to set options of."""

    def _send(self, message: WSMessage) -> None:
        if self.closed:
            raise ConnectionResetError("Cannot write to closing transport")
        random, disorder = self._network.machine.random, self._network.disorder if not self._patient else 0.0
        if disorder and message.type is WSMsgType.TEXT and random.random() < disorder:
            kind = random.randrange(3)
            if kind == 1:
                self._outgoing.extend((message, message))
            elif kind == 2:
                self._outgoing.appendleft(message)
        else:
            self._outgoing.append(message)
        self._push()

    def _push(self) -> None:
        """Send what waits, one after the other."""
        if self._under_way or not self._outgoing:
            return
        machine = self._network.machine
        if self._network.carries(self._host, self._to):
            self._under_way, self._blocked_since = True, None
            machine.call_later(self._network.delay_s(), self._deliver, context=KERNEL)
        elif self._blocked_since is None:
            self._blocked_since = machine.now
            self._network.carry(self._host, self._to, self._push)
            if not self._patient:
                machine.call_later(_UNANSWERED_S, self._give_up, machine.now, context=KERNEL)

    def _deliver(self) -> None:
        self._under_way = False
        self._blocked_since = None
        if self.other.closed:
            # Its kernel answers that there is no such connection.
            self._shut()
            return
        while self._outgoing:
            self.other.arrive(self._outgoing.popleft())
        self._push()

    def arrive(self, message: WSMessage) -> None:
        if self.closed:
            return
        self._arrived.append(message)
        self._wake()
        if message.type is WSMsgType.CLOSE:
            self._shut()

    def _give_up(self, since: float) -> None:
        if self._blocked_since == since and not self.closed:
            self._shut()

    def _process_ended(self) -> None:
        """The kernel closes what a process had open, and says so where the network carries."""
        if not self.closed:
            self.closed = True
            self._network.carry(self._host, self._to, self.other._shut)

    def _shut(self) -> None:
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Session:
    """In the place of ``aiohttp.ClientSession``."""

    def __init__(self, network: Network, host: str) -> None:
        self._network = network
        self._host = host

    async def __aenter__(self) -> _Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Its connections end with their own contexts."""

    async def ws_connect(self, url: str, **_: object) -> End:
        network, there = self._network, urlsplit(url).hostname or ""
        process = CURRENT.get()
        assert process is not None
        if not network.carries(self._host, there):
            await asyncio.sleep(_CONNECT_S)
            raise aiohttp.ServerTimeoutError("connection timeout")
        await asyncio.sleep(network.delay_s())
        listener = network.listeners.get(there)
        if listener is None or listener[0].state == "dead":
            raise aiohttp.ClientConnectionError("connection refused")
        near = End(network, self._host, there, process, patient=False)
        far = End(network, there, self._host, listener[0], patient=True)
        near.other, far.other = far, near
        accepted = network.machine.create_future()

        def accept() -> None:
            # Not before the process of the other side runs.
            if not accepted.done():
                accepted.set_result(None)
            listener[1](far)

        listener[0].soon(accept)
        listener[0].on_exit.append(lambda: None if accepted.done() else accepted.set_result(None))
        await accepted
        if near.closed or far.closed:
            raise aiohttp.ServerDisconnectedError
        return near
