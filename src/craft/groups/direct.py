"""The direct connection: a plain TCP connection between the two members of a generation of two.

Gloo passes every message to a thread that waits on its connection. On few cores these hand-overs cost more than the messages of
a short step. Here the calling thread sends and receives by itself.

A message is a header, parts whose sizes both ends know, and a tail of any size up to a limit. Each end sends one and then
receives one. The members prove to have the job's key when they connect; what follows is as plain as Gloo's messages.
"""

from __future__ import annotations

import queue
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec

from craft.groups import sockets
from craft.protocol.errors import GroupError, SnapshotCorrupt
from craft.protocol.membership import Generation
from craft.wire import peers
from craft.wire.peer_server import PeerServer
from craft.wire.peers import Peer, PeerRefusal

MAX_TAIL_BYTES = 1 << 28
_HEADER = struct.Struct("<IIQ")
"""Kind of the message, size of its tail, and size of its parts together."""
_AT_ONCE = 512
"""Parts per system call; the kernel's limit is 1024."""
_MAX_STRANGERS = 64
_LEAST_S = 0.05
"""Limit of a call when no time is left, since 0 would mean none; and the pause before a retry."""


class DirectConnection:
    """One end of the connection. One thread at a time uses it; any thread may end it."""

    def __init__(self, connection: socket.socket, error: Callable[[OSError], GroupError]) -> None:
        """``error`` makes the GroupError that calls raise, from the cause."""
        self._connection = connection
        self._error = error
        self._unsent: list[memoryview] = []
        # Held by the thread that is in a call. It closes the connection if that was ended meanwhile: a descriptor that is closed
        # during a call may be reused.
        self._in_call = threading.Lock()
        self._ended = False

    def send(self, kind: int, parts: Sequence[memoryview] = (), tail: bytes = b"") -> None:
        """Send as much of a message as fits into the kernel's buffer, and return at once.

        ``receive`` sends the rest. The parts must not change until then.
        """
        header = _HEADER.pack(kind, len(tail), sum(map(len, parts)))
        with self._call():
            # What is left of a message that no ``receive`` followed goes first.
            self._unsent = [*self._unsent, memoryview(header), *parts, memoryview(tail)]
            self._send(socket.MSG_DONTWAIT)

    def receive(self, kind: int, parts: Sequence[memoryview] = ()) -> bytearray:
        """Block until a message is received and the one before it is sent; fill ``parts`` and return the tail."""
        header = bytearray(_HEADER.size)
        with self._call():
            self._fill([memoryview(header)])
            found, tail_bytes, parts_bytes = _HEADER.unpack(header)
            expected = sum(map(len, parts))
            if (found, parts_bytes) != (kind, expected) or tail_bytes > MAX_TAIL_BYTES:
                raise ConnectionAbortedError(
                    f"received the header of message {found} with {parts_bytes}+{tail_bytes} bytes, expected"
                    f" message {kind} with {expected}+{MAX_TAIL_BYTES} at most"
                )
            tail = bytearray(tail_bytes)
            self._fill([*parts, memoryview(tail)])
            # The peer receives: it cannot go on before it has this message.
            while self._unsent:
                self._send()
        return tail

    def end(self) -> None:
        """Unblock the thread that is in a call, here and at the peer; every later call fails."""
        self._ended = True
        sockets.shut(self._connection)
        if self._in_call.acquire(blocking=False):
            self._connection.close()
            self._in_call.release()

    @contextmanager
    def _call(self) -> Iterator[None]:
        try:
            with self._in_call:
                if self._ended:
                    # Between two calls: the descriptor is closed already.
                    raise ConnectionAbortedError("the connection was ended")
                yield
        except OSError as error:
            raise self._error(error) from error
        finally:
            if self._ended:
                self._connection.close()

    def _fill(self, pieces: list[memoryview]) -> None:
        """Receive into all of ``pieces``; meanwhile send what is left to send: the peer may be sending as well."""
        pieces = _after(pieces, 0)
        while pieces:
            flags = socket.MSG_WAITALL
            if self._unsent:
                flags = socket.MSG_DONTWAIT
                self._send_or_wait()
            with suppress(BlockingIOError):
                size = self._connection.recvmsg_into(pieces[:_AT_ONCE], 0, flags)[0]
                if size == 0:
                    raise ConnectionResetError("the connection ended")
                pieces = _after(pieces, size)

    def _send_or_wait(self) -> None:
        """Block until something can be received or sent, and send it."""
        poller = select.poll()
        poller.register(self._connection, select.POLLIN | select.POLLOUT)
        poller.poll()
        self._send(socket.MSG_DONTWAIT)

    def _send(self, flags: int = 0) -> None:
        with suppress(BlockingIOError):
            # Some scripts let SIGPIPE end the process.
            size = self._connection.sendmsg(self._unsent[:_AT_ONCE], (), flags | socket.MSG_NOSIGNAL)
            self._unsent = _after(self._unsent, size)


def _after(pieces: Sequence[memoryview], size: int) -> list[memoryview]:
    """Return what is left of ``pieces`` after their first ``size`` bytes, without empty ones."""
    left = []
    for piece in pieces:
        if size < len(piece):
            left.append(piece[size:])
        size = max(0, size - len(piece))
    return left


class _Connect(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Rank 1 asks for the direct connection of a generation."""

    name: str
    nonce: bytes


class _Connected(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Rank 0 uses this connection."""


_CONNECT: msgspec.msgpack.Decoder[_Connect] = msgspec.msgpack.Decoder(_Connect)
_ANSWER: msgspec.msgpack.Decoder[_Connected | PeerRefusal] = msgspec.msgpack.Decoder(_Connected | PeerRefusal)


class DirectOpening:
    """How both members get their connection: rank 0 listens before they meet, rank 1 connects after that."""

    def __init__(self, generation: Generation, rank: int, key: bytes, limit_s: float) -> None:
        self._name = generation.name
        self._peer = generation.members[1 - rank].worker_id
        self._listens = rank == 0
        self._key = key
        self._deadline = time.monotonic() + limit_s
        self._server: PeerServer | None = None
        self._found: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        # Guards the next one: each connection to the server has a thread.
        self._lock = threading.Lock()
        self._taken = False

    def listen(self, host: str) -> str:
        """Return where rank 1 finds this member; on rank 1 there is nothing to find."""
        if not self._listens:
            return ""
        self._server = PeerServer(
            host, self._key, self._serve, name="opener", max_strangers=_MAX_STRANGERS, max_peers=_MAX_STRANGERS
        )
        return f"{host} {self._server.port}"

    def connect(self, place: str) -> socket.socket:
        """Return the connection, given what ``listen`` returned on rank 0; raise OSError if there is none in time."""
        try:
            connection = self._accept() if self._listens else self._visit_again(place)
        except (OSError, EOFError, SnapshotCorrupt, msgspec.MsgspecError) as error:
            why = "it did not answer in time" if isinstance(error, BlockingIOError) else error
            raise ConnectionError(f"no direct connection to {self._peer}: {why}") from None
        peers.unlimit(connection)
        return connection

    def close(self) -> None:
        """Stop listening; a connection that was not taken ends."""
        if self._server is not None:
            self._server.close()
        with suppress(queue.Empty):
            self._found.get_nowait().close()

    def _accept(self) -> socket.socket:
        try:
            return self._found.get(timeout=self._left_s)
        except queue.Empty:
            raise TimeoutError("it did not connect in time") from None

    def _serve(self, peer: Peer) -> None:
        request = _CONNECT.decode(peer.request)
        with self._lock:
            expected = request.name == self._name and not self._taken
            self._taken = self._taken or expected
        if not expected:
            peer.answer(PeerRefusal(f"no member of generation {request.name} is expected here"))
            return
        peer.answer(_Connected())
        assert self._server is not None
        self._server.release(peer)
        self._found.put(peer.connection)

    def _visit_again(self, place: str) -> socket.socket:
        """Visit rank 0; retry if it sends this member away to make room for other connections."""
        while True:
            try:
                return self._visit(place)
            except (EOFError, ConnectionResetError, BrokenPipeError):
                if self._left_s <= _LEAST_S:
                    raise
                time.sleep(_LEAST_S)

    def _visit(self, place: str) -> socket.socket:
        host, _, port = place.rpartition(" ")
        connection = socket.create_connection((host, int(port)), self._left_s)
        try:
            peers.prepare(connection)
            peers.limit(connection, self._left_s)
            request = msgspec.msgpack.encode(_Connect(self._name, secrets.token_bytes(16)))
            answer = _ANSWER.decode(peers.introduce(connection, request, self._key).read_answer(place))
            if isinstance(answer, PeerRefusal):
                raise ConnectionRefusedError(answer.reason)
        except BaseException:
            connection.close()
            raise
        return connection

    @property
    def _left_s(self) -> float:
        return max(_LEAST_S, self._deadline - time.monotonic())
