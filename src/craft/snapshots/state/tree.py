"""Convert the values of a ``state_dict`` to typed nodes with separate tensors, and back.

MessagePack carries the nodes bit for bit. Nothing is pickled. What cannot be sent as data, such as a function, is only named:
the receiver must have the same in its place.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import msgspec
import numpy
import torch

from craft.protocol.errors import ConfigError, SnapshotCorrupt
from craft.snapshots.state.index import TensorEntry
from craft.snapshots.state.leaves import tensor_bytes
from craft.snapshots.state.raw_memory import DTYPES, dense, resolved
from craft.snapshots.state.shards import Meshes, Placement, is_sharded, local_of, placed, placement_of


class Nothing(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Flag(msgspec.Struct, frozen=True, array_like=True, tag=True):
    value: bool


class Whole(msgspec.Struct, frozen=True, array_like=True, tag=True):
    value: str
    """In hexadecimal: numpy's generators have 128-bit integers, which MessagePack cannot hold."""


class Real(msgspec.Struct, frozen=True, array_like=True, tag=True):
    bits: bytes
    """As bytes, so that a NaN equals itself and -0.0 is not 0.0."""


class Complex(msgspec.Struct, frozen=True, array_like=True, tag=True):
    bits: bytes


class Text(msgspec.Struct, frozen=True, array_like=True, tag=True):
    data: bytes


class Raw(msgspec.Struct, frozen=True, array_like=True, tag=True):
    data: bytes


class Scalar(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Of numpy."""

    dtype: str
    data: bytes


class Array(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A numpy array; its bytes are sent like a tensor's."""

    index: int
    dtype: str
    shape: tuple[int, ...]
    transposed: bool


class Tensor(msgspec.Struct, frozen=True, array_like=True, tag=True):
    index: int


class Sharded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A sharded tensor: only the local one is sent, between workers of the same position."""

    index: int
    placement: Placement


class Own(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A function or class: the receiver uses its own of this name."""

    name: str


class Items(msgspec.Struct, frozen=True, array_like=True, tag=True):
    kind: Literal["list", "tuple", "Size", "set", "frozenset"]
    items: tuple[Node, ...]


class Table(msgspec.Struct, frozen=True, array_like=True, tag=True):
    kind: Literal["dict", "OrderedDict", "Counter", "defaultdict"]
    keys: tuple[int | str, ...]
    values: tuple[Node, ...]


Node = Nothing | Flag | Whole | Real | Complex | Text | Raw | Scalar | Array | Tensor | Sharded | Own | Items | Table

_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "Size": torch.Size, "set": set, "frozenset": frozenset}
_PLAIN_NUMPY = "biufcmM"
"""Kinds of numpy types whose bytes are their value."""
_DOUBLE = struct.Struct("<d")
_DOUBLES = struct.Struct("<dd")


class Packer:
    """Takes values apart. Each tensor gets an entry and keeps its memory; nothing is copied."""

    def __init__(self) -> None:
        self.entries: list[TensorEntry] = []
        self.tensors: list[torch.Tensor] = []

    def tensor(self, name: str, tensor: torch.Tensor) -> int:
        """Add a tensor and return its index."""
        flat = dense(resolved(name, tensor))
        self.tensors.append(flat)
        dtype = str(flat.dtype).removeprefix("torch.")
        self.entries.append(TensorEntry(name, dtype, tuple(flat.shape), tuple(flat.stride())))
        return len(self.entries) - 1

    def pack(self, name: str, value: Any) -> Node:
        """Return ``value`` as a node, or raise ConfigError that names what cannot be sent."""
        if is_sharded(value):
            return Sharded(self.tensor(name, local_of(value)), placement_of(value))
        if isinstance(value, torch.Tensor):
            return Tensor(self.tensor(name, value))
        if isinstance(value, Mapping):
            return self._table(name, value)
        if isinstance(value, list | tuple | set | frozenset):
            return self._items(name, value)
        if isinstance(value, numpy.ndarray):
            return self._array(name, value)
        if isinstance(value, numpy.generic) and value.dtype.kind in _PLAIN_NUMPY:
            return Scalar(value.dtype.str, value.tobytes())
        plain = _plain(value)
        if plain is None:
            raise ConfigError(
                f"{name} in the registered state is a {type(value).__qualname__}, which cannot be sent to a worker that"
                " joins: leave it out of state_dict(), or turn it into tensors, numbers and strings there"
            )
        return plain

    def _table(self, name: str, value: Mapping[Any, Any]) -> Node:
        for key in value:
            if type(key) is not str and (type(key) is not int or not -(1 << 63) <= key < 1 << 63):
                raise ConfigError(
                    f"{name} in the registered state has the key {key!r}, a {type(key).__qualname__}: only strings and"
                    " integers of 64 bits can be sent to a worker that joins"
                )
        kind: Any = type(value).__name__ if type(value) in (OrderedDict, Counter, defaultdict) else "dict"
        return Table(kind, tuple(value), tuple(self.pack(f"{name}.{key}", value[key]) for key in value))

    def _items(self, name: str, value: Any) -> Node:
        kind: Any = type(value).__name__
        if kind not in _SEQUENCES:
            if hasattr(value, "_fields"):
                raise ConfigError(
                    f"{name} in the registered state is the named tuple {kind}, which would arrive without its names:"
                    " make it a plain dict in state_dict()"
                )
            kind = next(base for base in _SEQUENCES if isinstance(value, _SEQUENCES[base]))
        items = tuple(self.pack(f"{name}.{index}", item) for index, item in enumerate(value))
        if isinstance(value, set | frozenset):
            # In an order independent of the process, whose string hashes differ.
            items = tuple(sorted(items, key=msgspec.msgpack.encode))
        return Items(kind, items)

    def _array(self, name: str, value: numpy.ndarray[Any, Any]) -> Node:
        if value.dtype.kind not in _PLAIN_NUMPY + "SU" or value.dtype.itemsize == 0:
            raise ConfigError(
                f"{name} in the registered state is an array of {value.dtype}, which cannot be sent to a worker that"
                " joins: make it one of numbers or strings"
            )
        transposed = value.flags.f_contiguous and not value.flags.c_contiguous
        flat = numpy.ascontiguousarray(value.T if transposed else value).reshape(-1).view(numpy.uint8)
        # torch warns about read-only memory, though nothing writes to it.
        index = self.tensor(name, torch.from_numpy(flat if flat.flags.writeable else flat.copy()))
        return Array(index, value.dtype.str, value.shape, transposed)


def obstacle(name: str, value: Any) -> str | None:
    """Return why a value cannot be sent; None if it can."""
    try:
        Packer().pack(name, value)
    except ConfigError as error:
        return str(error)
    return None


_NODES: dict[type, Callable[[Any], Node]] = {
    type(None): lambda _: Nothing(),
    # Before int, of which it is a subclass.
    bool: Flag,
    int: lambda value: Whole(hex(value)),
    float: lambda value: Real(_DOUBLE.pack(value)),
    complex: lambda value: Complex(_DOUBLES.pack(value.real, value.imag)),
    str: lambda value: Text(value.encode("utf-8", "surrogatepass")),
    bytes: lambda value: Raw(bytes(value)),
}
_VALUES: dict[type, Callable[[Any], Any]] = {
    Nothing: lambda _: None,
    Flag: lambda node: node.value,
    Whole: lambda node: int(node.value, 16),
    Real: lambda node: _DOUBLE.unpack(node.bits)[0],
    Complex: lambda node: complex(*_DOUBLES.unpack(node.bits)),
    Text: lambda node: node.data.decode("utf-8", "surrogatepass"),
    Raw: lambda node: node.data,
    Scalar: lambda node: numpy.frombuffer(node.data, numpy.dtype(node.dtype))[0],
}


def _plain(value: Any) -> Node | None:
    for kind, make in _NODES.items():
        if isinstance(value, kind):
            return make(value)
    return Own(_qualname(value)) if callable(value) else None


def _qualname(value: Any) -> str:
    return str(getattr(value, "__qualname__", type(value).__qualname__))


class Builder:
    """Builds values from nodes and tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor], meshes: Meshes | None = None) -> None:
        """``meshes``: those of the receiver's model, for sharded tensors."""
        self._tensors = tensors
        self._meshes = meshes or Meshes(())

    def build(self, name: str, node: Node, own: Any) -> Any:
        """Return the value of ``node``; ``own`` is the receiver's counterpart, or None."""
        if isinstance(node, Table):
            return self._table(name, node, own if isinstance(own, Mapping) else {})
        if isinstance(node, Items):
            mine = own if isinstance(own, list | tuple) else ()
            pairs = zip(node.items, chain(mine, [None] * len(node.items)), strict=False)
            return _SEQUENCES[node.kind](
                [self.build(f"{name}.{index}", item, each) for index, (item, each) in enumerate(pairs)]
            )
        if isinstance(node, Tensor):
            found = self._tensors[node.index]
            # On the device of what it replaces.
            return found.to(own.device) if isinstance(own, torch.Tensor) else found
        if isinstance(node, Sharded):
            found = self._tensors[node.index]
            return placed(found, own) if is_sharded(own) else self._meshes.placed(name, found, node.placement)
        if isinstance(node, Array):
            shape = node.shape[::-1] if node.transposed else node.shape
            array = self._tensors[node.index].numpy().view(node.dtype).reshape(shape)
            return array.T if node.transposed else array
        if isinstance(node, Own):
            if not callable(own) or _qualname(own) != node.name:
                raise ConfigError(f"{name} is {node.name} on the workers that train, and {own!r} here: build the same")
            return own
        return _VALUES[type(node)](node)

    def _table(self, name: str, node: Table, own: Mapping[Any, Any]) -> Any:
        values = {
            key: self.build(f"{name}.{key}", value, own.get(key))
            for key, value in zip(node.keys, node.values, strict=True)
        }
        if node.kind == "defaultdict":
            return defaultdict(getattr(own, "default_factory", None), values)
        if node.kind == "Counter":
            return Counter(values)
        if node.kind == "OrderedDict":
            ordered = OrderedDict(values)
            if hasattr(own, "_metadata"):
                # Layout versions of modules; without them load_state_dict would assume an old one.
                ordered._metadata = own._metadata  # type: ignore[attr-defined]
            return ordered
        return values


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
