"""Carry state from microbatch m of one step to microbatch m of the next (``step.carry``).

The values of a ``CarriedLane`` travel with the exchange of the step, as one row of bytes, so that every member has all of them
when it commits. ``CarriedState`` is registered like an optimizer: joiners, checkpoints and digests include it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch

from craft.protocol.control_word import Carried
from craft.protocol.errors import ConfigError
from craft.snapshots.state.index import TensorEntry, decode_as, entry_bytes
from craft.snapshots.state.raw_memory import DTYPES, memory_of
from craft.snapshots.state.tree import Builder, Node, Packer

REGISTERED_AS = "step.carry"
_LENGTH_BYTES = 8


class _Header(msgspec.Struct, frozen=True, array_like=True):
    """The content of one lane, without the bytes of its tensors."""

    values: dict[str, Node]
    entries: tuple[TensorEntry, ...]
    on_device: tuple[int, ...]
    """Entries that were on a GPU."""
    generators: dict[str, str]
    """Device type of each value that is the state of a ``torch.Generator``, by name."""


class CarriedLane:
    """The values of one microbatch, as attributes that the script reads and assigns."""

    def __init__(self, values: dict[str, Any]) -> None:
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_opened", set())

    def __getattr__(self, name: str) -> Any:
        if name not in self._opened:
            raise AttributeError(f"step.carry(...) was given no initial value of {name!r} in this microbatch")
        return self._values[name]

    def _left(self) -> torch.Tensor:
        """Return its values as one row of bytes."""
        return pack(self._values)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._opened:
            raise ConfigError(f"lane.{name} = ...: step.carry(...) was given no initial value of {name!r}")
        self._values[name] = value


class CarriedState:
    """All lanes as of the last commit. Belongs to the main thread."""

    left_out_if_empty = True
    """Then the state is the same as that of a script that carries nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._committed: dict[int, torch.Tensor] = {}
        """Rows of bytes in host memory, by microbatch."""

    def open(self, microbatch: int) -> CarriedLane:
        """Return the lane of a microbatch. The values are copies: a retry gets the same ones."""
        packed = self._committed.get(microbatch)
        return CarriedLane(unpack(packed, self._device) if packed is not None else {})

    @torch.no_grad()
    def commit(self, carried: Iterable[Carried], rows: Mapping[int, torch.Tensor]) -> None:
        """Take over the lanes of a committed step. ``rows`` has the bytes of each rank's microbatches."""
        begins = dict.fromkeys(rows, 0)
        for each in carried:
            begin = begins[each.rank]
            begins[each.rank] = end = begin + each.nbytes
            lane, row = self._committed.get(each.microbatch), rows[each.rank][begin:end]
            if lane is not None and lane.numel() == each.nbytes:
                # In place: the consistency check keeps references to these tensors.
                lane.copy_(row)
            else:
                self._committed[each.microbatch] = row.clone()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {str(microbatch): self._committed[microbatch] for microbatch in sorted(self._committed)}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self._committed = {int(microbatch): row.cpu().clone() for microbatch, row in state.items()}


def carry(lane: CarriedLane, initial: Mapping[str, Any], *, reset: bool) -> CarriedLane:
    """Set the initial values that ``lane`` lacks, or all of them after a ``reset``."""
    for name, value in initial.items():
        if name.startswith("_"):
            raise ConfigError(f"step.carry({name}=...): names of carried values begin with a letter")
        if name in lane._opened:
            continue
        if reset or name not in lane._values:
            # The same object may be given to several lanes, and to a retry.
            lane._values[name] = _copy(value() if callable(value) else value)
        lane._opened.add(name)
    return lane


def copy_of(data: Any) -> Any | None:
    """Return a copy of a microbatch's data; None if it holds more than tensors and plain values."""
    try:
        _check("data", data)
    except ConfigError:
        return None
    return _copy(data)


def _copy(value: Any) -> Any:
    """Copy ``value``; a tensor stays in its graph, so that an initial state can be learned."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, torch.Generator):
        generator = torch.Generator(value.device)
        generator.set_state(value.get_state())
        return generator
    if type(value) in (tuple, list):
        return type(value)(_copy(each) for each in value)
    if type(value) is dict:
        return {key: _copy(each) for key, each in value.items()}
    return value


@torch.no_grad()
def pack(given: Mapping[str, Any]) -> torch.Tensor:
    """Pack named values into one row of bytes in host memory."""
    packer = Packer()
    values, generators = {}, {}
    for name, value in sorted(given.items()):
        _check(name, value)
        if isinstance(value, torch.Generator):
            generators[name] = value.device.type
            value = value.get_state()
        values[name] = packer.pack(name, value)
    on_device = tuple(number for number, tensor in enumerate(packer.tensors) if tensor.is_cuda)
    header = msgspec.msgpack.encode(_Header(values, tuple(packer.entries), on_device, generators))
    head = len(header).to_bytes(_LENGTH_BYTES, "little") + header
    parts = [memory_of(tensor).cpu() for tensor in packer.tensors if tensor.numel()]
    return torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), *parts])


@torch.no_grad()
def unpack(row: torch.Tensor, device: torch.device) -> dict[str, Any]:
    """Return the values in a row of bytes; those that were on a GPU go to ``device``."""
    begin = _LENGTH_BYTES + int.from_bytes(row[:_LENGTH_BYTES].numpy().tobytes(), "little")
    header = decode_as(_Header, row[_LENGTH_BYTES:begin].numpy().tobytes(), "carried values")
    tensors = []
    for number, entry in enumerate(header.entries):
        tensor = torch.empty_strided(entry.shape, entry.stride, dtype=DTYPES[entry.dtype])
        if size := entry_bytes(entry):
            memory_of(tensor).copy_(row[begin : begin + size])
            begin += size
        tensors.append(tensor.to(device) if number in header.on_device else tensor)
    builder = Builder(tensors)
    values = {name: builder.build(name, node, None) for name, node in header.values.items()}
    for name, kind in header.generators.items():
        generator = torch.Generator(device if kind != "cpu" else "cpu")
        generator.set_state(values[name])
        values[name] = generator
    return values


def _check(name: str, value: Any, nested: bool = False) -> None:
    """Raise ConfigError unless packing and unpacking preserve ``value``."""
    if isinstance(value, torch.Tensor) or value is None or type(value) in (bool, int, float, complex, str):
        return
    if isinstance(value, torch.Generator) and not nested:
        return
    if type(value) in (tuple, list):
        for index, each in enumerate(value):
            _check(f"{name}[{index}]", each, nested=True)
    elif type(value) is dict and all(type(key) in (str, int) for key in value):
        for key, each in value.items():
            _check(f"{name}[{key!r}]", each, nested=True)
    else:
        raise ConfigError(
            f"step.carry: {name} is a {type(value).__qualname__} at the end of its microbatch: carried values are tensors,"
            " numbers, strings and None, tuples, lists and dicts of them (keys: strings and integers), or a torch.Generator"
        )
