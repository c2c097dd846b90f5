"""One plain value as bytes and back: its tree, followed by the bytes of its tensors.

For small values that travel beside the state, such as the position of a dataset. Nothing is pickled.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from craft.protocol.errors import SnapshotCorrupt
from craft.snapshots.state.index import TensorEntry
from craft.snapshots.state.leaves import tensor_bytes
from craft.snapshots.state.raw_memory import DTYPES
from craft.snapshots.state.tree import Builder, Node, Packer


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    node: Node
    entries: tuple[TensorEntry, ...]
    data: tuple[bytes, ...]


def pack(name: str, value: Any) -> bytes:
    """Return ``value`` as bytes, or raise ConfigError that names what cannot be sent."""
    packer = Packer()
    node = packer.pack(name, value)
    data = tuple(bytes(tensor_bytes(tensor)) for tensor in packer.tensors)
    return msgspec.msgpack.encode(_Packed(node, tuple(packer.entries), data))


def unpack(name: str, data: bytes) -> Any:
    """Return the value in ``data``, or raise SnapshotCorrupt."""
    try:
        packed = msgspec.msgpack.decode(data, type=_Packed)
        tensors = [_tensor(entry, raw) for entry, raw in zip(packed.entries, packed.data, strict=True)]
    except (msgspec.DecodeError, KeyError, ValueError, RuntimeError) as error:
        raise SnapshotCorrupt(f"{name} cannot be read: {error}") from None
    return Builder(tensors).build(name, packed.node, None)


def _tensor(entry: TensorEntry, raw: bytes) -> torch.Tensor:
    dtype = DTYPES[entry.dtype]
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.view(entry.shape)
