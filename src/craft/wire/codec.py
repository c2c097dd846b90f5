"""Bytes to typed messages and back. Nothing is ever unpickled, and nothing is read before its size is known."""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec

from craft.protocol.errors import MalformedMessage
from craft.protocol.messages import Directive, HostReport, WorkerReport

T = TypeVar("T")

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
_HEADER = struct.Struct("!I")
HEADER_BYTES = _HEADER.size

Message = WorkerReport | HostReport | Directive

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(WorkerReport | HostReport | Directive)


def encode(message: msgspec.Struct) -> bytes:
    """Return a message as JSON."""
    return _encoder.encode(message)


def decode(data: bytes | str) -> Message:
    """Return the message in ``data``, or raise MalformedMessage with the field that is wrong."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise MalformedMessage(f"message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"not a message of this protocol: {error}", field=field_of(error)) from None


def decode_as(data: bytes, kind: type[T]) -> T:
    """Return a value of ``kind``, or raise MalformedMessage."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(str(error), field=field_of(error)) from None


def field_of(error: Exception) -> str:
    """The path that msgspec names at the end of its message, such as ``$.worker_id``."""
    text = str(error)
    return text[text.rfind("`") + 1 :] if text.count("`") < 2 else text.split("`")[-2]


def frame(message: msgspec.Struct) -> bytes:
    """Return a message behind its length, for a stream."""
    data = encode(message)
    return _HEADER.pack(len(data)) + data


def frame_size(header: bytes) -> int:
    """Return the length that a frame's header announces, or raise MalformedMessage."""
    size = int(_HEADER.unpack(header)[0])
    if size > MAX_MESSAGE_BYTES:
        raise MalformedMessage(f"frame of {size} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return size
