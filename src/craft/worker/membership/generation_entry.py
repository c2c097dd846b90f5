"""The message of one member to the others when a generation begins."""

from __future__ import annotations

import msgspec

from craft.protocol.errors import ConfigError
from craft.protocol.membership import Claim
from craft.worker.membership.devices import DIFFERENT_DEVICES


class GenerationEntry(msgspec.Struct, frozen=True, array_like=True):
    """One member's message to the others when a generation begins."""

    claim: Claim
    trainable: bytes
    """Bitmap of the parameters that get gradients now. A joiner, whose script is not there yet, follows it."""


encode_entry = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(GenerationEntry).decode


def decode_entry(data: bytes) -> GenerationEntry:
    """Decode a member's entry; another member may have sent something else."""
    try:
        return _decode(data)
    except msgspec.DecodeError:
        raise ConfigError(DIFFERENT_DEVICES) from None
