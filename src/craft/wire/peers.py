"""Authenticated connections between workers of one job: both ends prove to have the job's key.

1. The server sends a random challenge.
2. The client sends a request with a nonce, and a tag: a keyed BLAKE3 over challenge and request.
3. All later messages and data frames are sealed: each is followed by a tag over its number and the BLAKE3 of its bytes, under a
   key derived from the job's key, the challenge and the request. One hash serves as checksum and authentication, old answers
   cannot be replayed, and a frame is hashed once however many peers receive it.

Nothing is encrypted. Everything is bounded, and nothing is unpickled. ``peer_server.py`` is the server end.
"""

from __future__ import annotations

import hmac
import socket
import struct
import time

import msgspec
from blake3 import blake3

from craft.protocol.errors import ConfigError, SnapshotCorrupt

KEY_BYTES = 32
CHALLENGE_BYTES = 32
TAG_BYTES = 32
MAX_MESSAGE_BYTES = 4096
FRAME_BYTES = 1 << 20
"""Small enough to stay in the processor's cache until it is hashed; large enough that a frame costs only two short turns
of the interpreter beside a training loop."""
_SIZE = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")
_TIME = struct.Struct("@ll")


class PeerRefusal(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The server refuses the request."""

    reason: str


def check_key(key: bytes) -> None:
    if len(key) != KEY_BYTES:
        raise ConfigError(f"the job's key has {len(key)} bytes: it must have {KEY_BYTES}")


def request_tag(key: bytes, challenge: bytes, request: bytes) -> bytes:
    """Return the tag that proves that ``request`` comes from an owner of the key, now."""
    return blake3(b"request" + challenge + request, key=key).digest()


def same_tag(left: bytes, right: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(left, right)


def digest_of(*pieces: memoryview | bytes) -> bytes:
    """Return the hash of a frame that consists of ``pieces``."""
    hasher = blake3()
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


class Seal:
    """Makes or checks the tags of one direction, frame after frame."""

    def __init__(self, key: bytes, challenge: bytes, request: bytes, way: bytes = b"answer") -> None:
        """``way`` names the direction; both ends use the same."""
        self._key = blake3(way + challenge + request, key=key).digest()
        self._number = 0

    def tag(self, digest: bytes) -> bytes:
        """Return the tag of the next frame, whose bytes have this digest."""
        tag = blake3(_NUMBER.pack(self._number) + digest, key=self._key).digest()
        self._number += 1
        return tag

    def check(self, digest: bytes, tag: bytes, address: str) -> None:
        """Raise SnapshotCorrupt unless ``tag`` is that of the next frame."""
        number = self._number
        if not same_tag(self.tag(digest), tag):
            raise SnapshotCorrupt(
                f"frame {number} from {address} is damaged, or does not come from an owner of this job's key", address
            )


class Peer:
    """One authenticated connection, as both ends see it after the request."""

    def __init__(self, connection: socket.socket, key: bytes, challenge: bytes, request: bytes) -> None:
        self.connection = connection
        self.request = request
        self.answers = Seal(key, challenge, request)
        """Seals what goes to the client."""
        self.body = Seal(key, challenge, request, b"body")
        """Seals what the client sends after its request."""

    def answer(self, message: msgspec.Struct) -> None:
        """Send the answer, or the header of its frames."""
        data = msgspec.msgpack.encode(message)
        send_message(self.connection, data, self.answers.tag(digest_of(data)))

    def read_answer(self, address: str) -> bytes:
        """Return the bytes of the answer. Raises SnapshotCorrupt, msgspec.DecodeError, OSError or EOFError."""
        size = message_size(receive(self.connection, SIZE_BYTES))
        found = receive(self.connection, size)
        self.answers.check(digest_of(found), receive(self.connection, TAG_BYTES), address)
        return found


def introduce(connection: socket.socket, request: bytes, key: bytes) -> Peer:
    """Make ``request``, of up to MAX_MESSAGE_BYTES, as an owner of the key."""
    challenge = receive(connection, CHALLENGE_BYTES)
    send_message(connection, request, request_tag(key, challenge, request))
    return Peer(connection, key, challenge, request)


def send_message(connection: socket.socket, data: bytes, tag: bytes) -> None:
    connection.sendall(_SIZE.pack(len(data)) + data + tag)


def message_size(header: bytes) -> int:
    """Return the size in a message's header, or raise msgspec.DecodeError if it is over the limit."""
    size = int(_SIZE.unpack(header)[0])
    if size > MAX_MESSAGE_BYTES:
        raise msgspec.DecodeError(f"a message of {size} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return size


SIZE_BYTES = _SIZE.size


def send_frames(connection: socket.socket, seal: Seal, data: memoryview) -> None:
    """Send ``data`` in frames."""
    for begin in range(0, len(data), FRAME_BYTES):
        frame = data[begin : begin + FRAME_BYTES]
        send_frame(connection, frame, seal.tag(digest_of(frame)))


def send_frame(connection: socket.socket, frame: memoryview, tag: bytes) -> None:
    connection.sendall(frame)
    connection.sendall(tag)


def receive_into(connection: socket.socket, room: memoryview) -> None:
    """Fill ``room``, or raise EOFError if the connection ends first."""
    while len(room):
        size = connection.recv_into(room, len(room), socket.MSG_WAITALL)
        if size == 0:
            raise EOFError("the connection ended")
        room = room[size:]


def receive(connection: socket.socket, size: int) -> bytes:
    room = bytearray(size)
    receive_into(connection, memoryview(room))
    return bytes(room)


def receive_frames(connection: socket.socket, seal: Seal, size: int, address: str) -> bytes:
    """Receive ``size`` bytes in frames; memory is allocated as they arrive."""
    data = bytearray()
    while len(data) < size:
        frame = receive(connection, min(FRAME_BYTES, size - len(data)))
        seal.check(digest_of(frame), receive(connection, TAG_BYTES), address)
        data += frame
    return bytes(data)


def receive_within(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Receive from an unauthenticated peer: all of it before ``deadline``, in however small pieces."""
    data = bytearray()
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{size} bytes did not come in time")
        limit(connection, left)
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError("the connection ended")
        data += part
    return bytes(data)


def limit(connection: socket.socket, silence_s: float) -> None:
    """Make blocking calls fail after ``silence_s`` without progress.

    Uses the kernel's timeouts: with Python's, a call would poll and transfer in two steps, and take a turn of the interpreter
    for every few packets.
    """
    value = _TIME.pack(int(silence_s), int(silence_s % 1 * 1e6) or 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def unlimit(connection: socket.socket) -> None:
    """Let blocking calls wait without a limit again."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(0, 0))


def prepare(connection: socket.socket) -> None:
    """Set the socket options that both ends share."""
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
