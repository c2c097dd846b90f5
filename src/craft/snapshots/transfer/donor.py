"""The donor: sends a stripe of this worker's training state to workers that join, while it goes on training.

Only the copy in ``stage``, on the main thread at a step boundary, delays the step. Threads send it to peers that prove to have
the job's key (``fetch.py``), and small results for late workers. The worker owns one for the life of its process.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from craft.protocol.errors import ConfigError
from craft.snapshots.state.device_copy import PinnedMemory
from craft.snapshots.state.raw_memory import carve, room
from craft.snapshots.state.reserved_memory import Reserve
from craft.snapshots.state.serialized import State, encode_header, stripe_of
from craft.snapshots.transfer import protocol
from craft.snapshots.transfer.staged import Staged
from craft.wire import peers
from craft.wire.peer_server import PeerServer
from craft.wire.peers import Peer

T = TypeVar("T")

_WAIT_S = 0.2
"""How often to check whether a waiting peer has left."""
_MAX_STRANGERS = 128
_MAX_PEERS = 512
"""Authenticated connections that are served at the same time."""
_GONE_NAMES = 64
_REQUEST: msgspec.msgpack.Decoder[protocol.Request] = msgspec.msgpack.Decoder(protocol.StripeOf | protocol.ResultOf)


class _Refused(Exception):
    """There is nothing to send, and will not be."""


class Donor:
    """Listens on ``address``, on a free port; ``key`` is the job's, of 32 bytes."""

    def __init__(self, address: str, key: bytes) -> None:
        # Guards everything below: the main thread stages, and each connection has a thread.
        self._change = threading.Condition()
        self._staged: Staged | None = None
        self._gone: deque[str] = deque(maxlen=_GONE_NAMES)
        """Names that were staged earlier: requests for them are refused."""
        self._results: dict[str, bytes] = {}
        self._kept: dict[str, bytes] = {}
        self._closed = False
        self._reserved: Reserve | None = None
        self._last: Staged | None = None
        """The last staged copy, if its memory stays. These two belong to the main thread."""
        self._server = PeerServer(
            address, key, self._serve, name="donor", max_strangers=_MAX_STRANGERS, max_peers=_MAX_PEERS
        )
        self.port = self._server.port

    # On the main thread.

    def stage(self, name: str, level: int, state: State, part: int, of: int) -> None:
        """Copy stripe ``part`` of ``of`` of ``state`` and serve it under ``name``; ``level`` is its step."""
        if not 0 <= part < of:
            raise ConfigError(f"there is no stripe {part} of {of}")
        # Free the old copy first, or there would be two at a time.
        self.release()
        begin, end = stripe_of(state.header.total_bytes, part, of)
        memory = self._room(end - begin)
        stripe = carve(memory, 0, end - begin)
        state.copy(begin, end, stripe)
        large = bool(state.header.on_device)
        staged = Staged(name, level, part, of, encode_header(state.header), stripe, state.copied(), large=large)
        self._last = staged if memory.is_pinned else None
        with self._change:
            self._staged = staged
            self._change.notify_all()

    def _room(self, size: int) -> PinnedMemory:
        """Return memory for a stripe: the reserved one. Pinned memory, which takes long to make, stays for the next one."""
        last, self._last = self._last, None
        if last is not None:
            with self._change:
                in_use = last.num_served > 0
            if in_use:
                self._reserved = None
            else:
                last.end()
        memory = self._reserved.take(size) if self._reserved is not None else room(size)
        if not memory.is_pinned:
            self._reserved = None
        return memory

    def reserve(self, size: int) -> None:
        """Allocate ``size`` bytes for a stripe in the background, so that the next ``stage`` only has to copy.

        The first touch of memory can cost more than the copy, and would delay the step.
        """
        if self._reserved is None or self._reserved.size < size:
            self._reserved = Reserve(size)

    @property
    def prepared(self) -> bool:
        """Whether the requested memory is ready: until then ``stage`` would wait for it."""
        return self._reserved is None or self._reserved.is_there

    def release(self) -> None:
        """Drop the staged copy. Its memory is freed when no peer is served from it any more."""
        with self._change:
            if self._staged is not None:
                self._gone.append(self._staged.name)
            self._staged = None
            self._change.notify_all()

    def remember(self, key: str, data: bytes) -> None:
        """Keep a small result under ``key`` for late workers."""
        with self._change:
            self._results[key] = data
            self._change.notify_all()

    def keep(self, key: str, data: bytes) -> None:
        """The same, permanently."""
        with self._change:
            self._kept[key] = data
            self._change.notify_all()

    def drop(self, keys: Iterable[str]) -> None:
        """Drop permanent results that no worker can need any more."""
        with self._change:
            for key in keys:
                self._kept.pop(key, None)

    def forget(self) -> None:
        """Drop all remembered results except permanent ones."""
        with self._change:
            self._results.clear()

    def close(self) -> None:
        """End all connections and threads."""
        with self._change:
            self._closed = True
            staged, self._staged = self._staged, None
            self._results.clear()
            self._change.notify_all()
        if staged is not None:
            staged.end()
        self._server.close()

    # On the donor's threads.

    def _serve(self, peer: Peer) -> None:
        request, connection, seal = _REQUEST.decode(peer.request), peer.connection, peer.answers
        if isinstance(request, protocol.ResultOf):
            result = self._wait(connection, lambda: self._results.get(request.name, self._kept.get(request.name)))
            peer.answer(protocol.Result(len(result)))
            peers.send_frames(connection, seal, memoryview(result))
            return
        try:
            found = self._wait(connection, lambda: self._take_up(request))
        except _Refused as reason:
            peer.answer(peers.PeerRefusal(str(reason)))
            return
        try:
            sizes = len(found.header), len(found.view), found.frame_bytes
            peer.answer(protocol.Stripe(found.name, found.level, *sizes))
            peers.send_frames(connection, seal, memoryview(found.header))
            for begin in protocol.lane_of(len(found.view), found.frame_bytes, request.lane, request.lanes):
                peers.send_frame(connection, found.frame(begin), seal.tag(found.digest(begin)))
        finally:
            with self._change:
                found.num_served -= 1

    def _take_up(self, request: protocol.StripeOf) -> Staged | None:
        """Return what is requested, counted as being served; None if it is not there yet."""
        if not 0 <= request.lane < request.lanes <= protocol.MAX_LANES:
            raise _Refused(f"there is no lane {request.lane} of {request.lanes}")
        staged = self._staged
        if staged is not None and staged.name == request.name:
            if (staged.part, staged.of) == (request.part, request.of):
                staged.num_served += 1
                return staged
            raise _Refused(f"the donor has stripe {staged.part} of {staged.of}, not {request.part} of {request.of}")
        if request.name in self._gone:
            raise _Refused("the donor does not have this state any more")
        return None

    def _wait(self, connection: socket.socket, find: Callable[[], T | None]) -> T:
        """Wait until ``find`` finds something, or the peer leaves."""
        with self._change:
            while (found := find()) is None:
                if self._closed:
                    raise EOFError("the donor is closed")
                self._change.wait(_WAIT_S)
                _check_waiting(connection)
            return found


def _check_waiting(connection: socket.socket) -> None:
    """Raise EOFError if the waiting peer has left, or sends more data."""
    with contextlib.suppress(BlockingIOError):
        if connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
            raise EOFError("the peer left before there was anything for it")
        raise EOFError("the peer sent more than one request")
