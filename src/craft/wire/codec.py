"""Encode and decode typed messages. Nothing is unpickled, and nothing is read before its size is known."""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from craft.protocol.errors import MalformedMessage
from craft.protocol.heartbeats import Heartbeat, Pace, Update
from craft.protocol.messages import Directive, HostReport, WorkerReport
from craft.protocol.values.inspection import Collectives, Look, Looked, Stacks

T = TypeVar("T")

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
_HEADER = struct.Struct("!I")
HEADER_BYTES = _HEADER.size

PACKED_FROM_BYTES = 16 * 1024
"""Messages of this size and more are compressed."""
_PACK_LEVEL = 1

Message = WorkerReport | HostReport | Directive | Heartbeat | Pace | Update | Look | Looked | Stacks | Collectives

_AT = re.compile(r" - at `([^`]*)`$")
_NAMED = re.compile(r"(?:required|unknown) field `([^`]*)`")

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Message)


def encode(message: msgspec.Struct) -> bytes:
    """Return a message as JSON, without metrics that are not finite: JSON cannot express them."""
    if isinstance(message, HostReport):
        workers = tuple(map(_finite, message.workers))
        message = message if workers == message.workers else replace(message, workers=workers)
    elif isinstance(message, WorkerReport):
        message = _finite(message)
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        # Not valid text, such as an odd file name in a traceback: replace what cannot be encoded.
        return json.dumps(msgspec.to_builtins(message), ensure_ascii=False).encode(errors="replace")


def _finite(report: WorkerReport) -> WorkerReport:
    if math.isfinite(report.step_s) and all(map(math.isfinite, report.metrics.values())):
        return report
    metrics = {name: value for name, value in report.metrics.items() if math.isfinite(value)}
    return replace(report, metrics=metrics, step_s=report.step_s if math.isfinite(report.step_s) else 0.0)


def decode(data: bytes | str) -> Message:
    """Return the message in ``data``, or raise MalformedMessage that names the wrong field."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise MalformedMessage(f"message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        message: Message = _decoder.decode(data)
        return message
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise MalformedMessage(f"not a message of this protocol: {error}", field=field_of(error)) from None


def pack(message: msgspec.Struct) -> str | bytes:
    """Return a message for a WebSocket: a small one as text, a large one compressed."""
    data = encode(message)
    return data.decode() if len(data) < PACKED_FROM_BYTES else zlib.compress(data, _PACK_LEVEL)


def unpack(data: str | bytes) -> Message:
    """Return the message in a WebSocket frame; raise MalformedMessage also if it is too large once decompressed."""
    if isinstance(data, str):
        return decode(data)
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(data, MAX_MESSAGE_BYTES)
    except zlib.error as error:
        raise MalformedMessage(f"a packed message that cannot be unpacked: {error}") from None
    if not unpacker.eof or unpacker.unconsumed_tail or unpacker.unused_data:
        raise MalformedMessage(f"a packed message is torn, or over the limit of {MAX_MESSAGE_BYTES} bytes")
    return decode(text)


def decode_as(data: bytes, kind: type[T]) -> T:
    """Return a value of ``kind``, or raise MalformedMessage."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise MalformedMessage(str(error), field=field_of(error)) from None


def field_of(error: Exception) -> str:
    """Return the path of the field that a decoding error names, such as ``$.worker_id``; empty if it names none."""
    text = str(error)
    where = _AT.search(text)
    named = _NAMED.search(text)
    path = where.group(1) if where else "$"
    if named:
        return f"{path}.{named.group(1)}"
    return path if where else ""


def frame(message: msgspec.Struct) -> bytes:
    """Return a message with its length in front, for a stream."""
    data = encode(message)
    return _HEADER.pack(len(data)) + data


def frame_size(header: bytes) -> int:
    """Return the length in a frame's header, or raise MalformedMessage."""
    size = int(_HEADER.unpack(header)[0])
    if size > MAX_MESSAGE_BYTES:
        raise MalformedMessage(f"frame of {size} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return size
