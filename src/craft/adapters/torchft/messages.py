"""The few fields of torchft's messages that the proxy reads, and the messages of CRAFT's workers to it.

torchft uses gRPC with Protocol Buffers. The proxy forwards the bytes unchanged, except for the number of a quorum, which must
keep growing when another lighthouse takes over. Fields, by ``torchft.proto``: a quorum request has the asking replica as field
1, a heartbeat its id as field 1; a response has the quorum as field 1, and that its number as field 1 and its members as field
2; the first field of a member is its id.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from craft.protocol.errors import MalformedMessage

QUORUM = "/torchft.LighthouseService/Quorum"
HEARTBEAT = "/torchft.LighthouseService/Heartbeat"
ATTEND = "/craft.Torchft/Attend"
GONE = "/craft.Torchft/Gone"

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class Attends(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker of CRAFT reports which replica of torchft it is."""

    worker_id: str
    replica_id: str


class Gone(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers that CRAFT has declared lost. Every survivor sends it once it has aborted its exchange with them."""

    worker_id: str
    """The sender."""
    generation: int
    worker_ids: tuple[str, ...]


class Quorum(msgspec.Struct, frozen=True, kw_only=True):
    """A quorum, as far as the proxy needs it."""

    number: int
    replica_ids: tuple[str, ...]


def asking(request: bytes) -> str:
    """Return the id of the replica that asks for a quorum."""
    return _text(_first(_first(request, 1), 1))


def beating(request: bytes) -> str:
    """Return the id of the replica that sends a heartbeat."""
    return _text(_first(request, 1))


def heartbeat_of(replica_id: str) -> bytes:
    return _field(1, replica_id.encode())


def quorum_in(response: bytes) -> Quorum:
    quorum = _first(response, 1)
    number = next((value for field, value in _fields(quorum) if field == 1 and isinstance(value, int)), 0)
    members = [value for field, value in _fields(quorum) if field == 2 and isinstance(value, bytes)]
    return Quorum(number=number, replica_ids=tuple(_text(_first(member, 1)) for member in members))


def renumbered(response: bytes, number: int) -> bytes:
    """Return the response with another quorum number."""
    parts = [_varint(1 << 3 | _VARINT) + _varint(number)]
    for field, value in _fields(_first(response, 1)):
        if field != 1:
            assert isinstance(value, bytes)
            parts.append(_field(field, value))
    return _field(1, b"".join(parts))


def _first(message: bytes, wanted: int) -> bytes:
    """Return the bytes of the first field of this number; empty if it is missing, as empty ones are sent."""
    return next((value for field, value in _fields(message) if field == wanted and isinstance(value, bytes)), b"")


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _read_varint(message, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            size, at = _read_varint(message, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise MalformedMessage(f"a field of torchft has the unknown kind {kind}", "$")
        if at + size > len(message):
            raise MalformedMessage("a message of torchft ends in the middle of a field", "$")
        yield key >> 3, message[at : at + size]
        at += size


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise MalformedMessage("a message of torchft ends in the middle of a number", "$")
        value |= (message[at] & 0x7F) << shift
        at += 1
        if not message[at - 1] & 0x80:
            return value, at
        shift += 7


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _text(value: bytes) -> str:
    return value.decode(errors="replace")
