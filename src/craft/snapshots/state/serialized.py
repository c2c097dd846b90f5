"""Serialize the training state: a typed header, and the bytes of all tensors in sequence.

``load`` puts a received state into the objects of another worker, and verifies it bit for bit.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from craft.protocol.errors import ConfigError, SnapshotCorrupt
from craft.snapshots.state.device_copy import Copied, Copies, own_device
from craft.snapshots.state.index import ByteLayout, TensorEntry, decode_as, entry_bytes
from craft.snapshots.state.leaves import Stateful, module_leaves
from craft.snapshots.state.raw_memory import DTYPES, is_dense, memory_of, same_bits
from craft.snapshots.state.shards import Meshes, Placement, local_of, module_shards, reshard
from craft.snapshots.state.tree import Builder, Items, Node, Packer, Table

STRIPE_ALIGN = 4096
_SMALL_BYTES = 1 << 16


class Header(msgspec.Struct, frozen=True):
    """Everything about a state except the bytes of its tensors. Equal states have equal headers."""

    entries: tuple[TensorEntry, ...]
    """The tensors, in the order of their bytes."""
    module_entries: int
    """How many of them, from the first, are parameters and buffers of modules."""
    skeleton: dict[str, Node]
    """The ``state_dict`` of each registered object, with tensors as numbers of entries."""
    names: dict[str, int]
    """The entry of each key of the modules' ``state_dict``: some tensors have two keys, some buffers have none."""
    conditions: bytes
    """Data of the caller for the receiver."""
    total_bytes: int
    on_device: tuple[int, ...] = ()
    """Entries that were on a GPU. If the receiver has no counterpart yet, they go to its GPU."""
    shards: dict[int, Placement] | msgspec.UnsetType = msgspec.UNSET
    """Placement of the sharded parameters and buffers, by the number of their entry; omitted if there are none."""
    buffers: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    """Entries that are buffers, which may differ between the workers of a replica; omitted where ``shards`` is."""


def encode_header(header: Header) -> bytes:
    return msgspec.msgpack.encode(header)


def decode_header(data: bytes) -> Header:
    """Return the header in ``data``, or raise SnapshotCorrupt if it is inconsistent."""
    header = decode_as(Header, data, "a training state")
    for entry in header.entries:
        fits = entry.dtype in DTYPES and len(entry.shape) == len(entry.stride)
        if not fits or min(entry.shape, default=0) < 0 or not is_dense(entry.shape, entry.stride):
            raise SnapshotCorrupt(f"no tensor has the form that the header gives {entry.name}: {entry}")
    numbers = range(header.module_entries)
    if (
        ByteLayout(header.entries).total_bytes != header.total_bytes
        or header.module_entries > len(header.entries)
        or any(
            number not in numbers
            for number in (*header.names.values(), *(header.shards or {}), *(header.buffers or ()))
        )
    ):
        raise SnapshotCorrupt("the header of a training state contradicts itself")
    return header


def carried_bytes(header: Header) -> int:
    """Return the bytes that a joiner must allocate in host memory.

    All except parameters and buffers, which it has already, and what goes to a device.
    """
    elsewhere = {*range(header.module_entries), *header.on_device}
    # Each tensor is aligned, so that this is slightly more than their sum.
    return sum(entry_bytes(entry) + 64 for number, entry in enumerate(header.entries) if number not in elsewhere)


def stripe_of(total_bytes: int, part: int, of: int) -> tuple[int, int]:
    """Return the byte range of stripe ``part`` of ``of``; together they cover everything without overlap."""

    def cut(number: int) -> int:
        return total_bytes if number == of else total_bytes * number // of // STRIPE_ALIGN * STRIPE_ALIGN

    return cut(part), cut(part + 1)


class State:
    """The current training state. Plain values are copied on construction; tensors stay where they are."""

    def __init__(
        self, modules: Mapping[str, torch.nn.Module], registered: Mapping[str, Stateful], conditions: bytes
    ) -> None:
        reshard(modules.values())
        packer = Packer()
        steady: set[int] = set()
        parameters = {f"{prefix}.{name}" for prefix, module in modules.items() for name, _ in module.named_parameters()}
        for leaf in module_leaves(modules):
            assert isinstance(leaf.value, torch.Tensor)
            packer.tensor(leaf.name, leaf.value)
            if leaf.name in parameters:
                steady.add(len(packer.entries) - 1)
        module_entries = len(packer.entries)
        names = _names(modules)
        shards = module_shards(modules)
        skeleton: dict[str, Node] = {}
        for name, item in registered.items():
            first = len(packer.entries)
            values = item.state_dict()
            if not values and _may_be_left_out(item):
                continue
            skeleton[name] = packer.pack(name, values)
            if isinstance(item, torch.optim.Optimizer):
                steady.update(range(first, len(packer.entries)))
        self.tensors = packer.tensors
        self._steady = frozenset(steady)
        """Tensors that only the script's update code changes. Buffers are not among them: forward changes them."""
        self._copies = Copies()
        self._memory: dict[int, torch.Tensor] = {}
        self._layout = ByteLayout(packer.entries)
        self.header = Header(
            entries=tuple(packer.entries),
            module_entries=module_entries,
            skeleton=skeleton,
            names=names,
            conditions=conditions,
            total_bytes=self._layout.total_bytes,
            on_device=tuple(number for number, tensor in enumerate(packer.tensors) if tensor.is_cuda),
            shards=shards or msgspec.UNSET,
            buffers=tuple(each for each in range(module_entries) if each not in steady) if shards else msgspec.UNSET,
        )

    def copy(self, begin: int, end: int, out: torch.Tensor) -> None:
        """Copy a range of bytes into ``out``, which has that size; bytes on a device arrive only with ``copied``."""
        filled, target = 0, out.data_ptr()
        for index, first, last in self._layout.pieces(begin, end):
            size, tensor = last - first, self.tensors[index]
            if size < _SMALL_BYTES and tensor.device.type == out.device.type == "cpu":
                # An optimizer has thousands of these, and each torch call costs more than its copy.
                ctypes.memmove(target + filled, tensor.data_ptr() + first, size)
            elif tensor.is_cuda:
                place = out[filled : filled + size]
                self._copies.add(self._bytes(index)[first:last], place, steady=index in self._steady)
            else:
                out[filled : filled + size].copy_(memory_of(tensor)[first:last])
            filled += size

    def _bytes(self, index: int) -> torch.Tensor:
        if index not in self._memory:
            self._memory[index] = memory_of(self.tensors[index])
        return self._memory[index]

    def copied(self, *, gently: bool = False) -> Copied:
        """Return a function that waits for all copies so far: at once, unless they come from a device.

        ``gently``: there is no hurry, and the copies leave the link to the device to others most of the time.
        """
        return self._copies.begin(gently=gently)


def _may_be_left_out(item: Stateful) -> bool:
    """Return whether a state omits ``item`` while its ``state_dict`` is empty."""
    return bool(getattr(item, "left_out_if_empty", False))


def _names(modules: Mapping[str, torch.nn.Module]) -> dict[str, int]:
    numbers = {id(leaf.value): number for number, leaf in enumerate(module_leaves(modules))}
    return {
        f"{prefix}.{key}": numbers[id(local)]
        for prefix, module in modules.items()
        for key, value in module.state_dict(keep_vars=True).items()
        if id(local := local_of(value)) in numbers
    }


def targets(modules: Mapping[str, torch.nn.Module], *, devices: bool = False) -> dict[TensorEntry, torch.Tensor]:
    """Return parameters and buffers into which bytes can be received directly, by the matching entry.

    ``devices``: include those on devices.
    """
    packer = Packer()
    for leaf in module_leaves(modules):
        assert isinstance(leaf.value, torch.Tensor)
        index = packer.tensor(leaf.name, leaf.value)
        place = leaf.value.device.type
        if packer.tensors[index].data_ptr() != leaf.value.data_ptr() or not (
            place == "cpu" or (devices and place == "cuda")
        ):
            # A copy, or memory that a socket cannot fill: load() handles it.
            packer.entries.pop()
            packer.tensors.pop()
    return dict(zip(packer.entries, packer.tensors, strict=True))


@torch.no_grad()
def load(
    header: Header,
    tensors: Sequence[torch.Tensor],
    modules: Mapping[str, torch.nn.Module],
    registered: Mapping[str, Stateful],
) -> None:
    """Load a state into freshly built objects, in place, and verify it.

    Raises ConfigError that names what does not match or was not restored; part of the state may have been written then.
    """
    tensors = _placed(header, tensors, modules)
    _load_modules(header, tensors, modules)
    missing = [name for name, item in registered.items() if name not in header.skeleton and _may_be_left_out(item)]
    wanted = [name for name in registered if name not in missing]
    if list(header.skeleton) != wanted:
        raise ConfigError(
            f"{', '.join(wanted) or 'nothing'} is registered here, and {', '.join(header.skeleton) or 'nothing'} on the"
            " workers that train: register the same, in the same order"
        )
    builder = Builder(tensors, Meshes(param for module in modules.values() for param in module.parameters()))
    # Optimizers last: changes of their learning rates by other objects' loading must not stay.
    for name in sorted(registered, key=lambda each: isinstance(registered[each], torch.optim.Optimizer)):
        if name in missing:
            registered[name].load_state_dict({})
        else:
            _load_item(name, registered[name], header.skeleton[name], builder)
    _verify(header, tensors, State(modules, registered, header.conditions))


def _placed(
    header: Header, tensors: Sequence[torch.Tensor], modules: Mapping[str, torch.nn.Module]
) -> Sequence[torch.Tensor]:
    """Return ``tensors`` on their devices: those of modules where these are, others where they came from."""
    leaves = [leaf.value for leaf in module_leaves(modules) if isinstance(leaf.value, torch.Tensor)]
    own = own_device(leaves) or torch.device("cpu")
    places = dict.fromkeys(header.on_device, own)
    places |= {number: leaf.device for number, leaf in enumerate(leaves[: header.module_entries])}
    return [tensor.to(places.get(number, tensor.device)) for number, tensor in enumerate(tensors)]


def _load_modules(header: Header, tensors: Sequence[torch.Tensor], modules: Mapping[str, torch.nn.Module]) -> None:
    here = State(modules, {}, b"")
    for mine, theirs in itertools.zip_longest(here.header.entries, header.entries[: header.module_entries]):
        if mine != theirs:
            raise ConfigError(f"the modules do not match the training state, first in {_unlike(mine, theirs)}")
    for leaf, source in zip(module_leaves(modules), tensors, strict=False):
        assert isinstance(leaf.value, torch.Tensor)
        # Equal bits are skipped: an expanded constant could not be written to.
        if not same_bits(leaf.value, source):
            leaf.value.copy_(source)
        # Bytes received through a socket did not count as a change.
        torch.autograd.graph.increment_version(leaf.value)


def _unlike(mine: TensorEntry | None, theirs: TensorEntry | None) -> str:
    if mine is None or theirs is None or mine.name != theirs.name:
        side = "the workers that train have nothing" if theirs is None else f"they have {theirs.name}"
        return f"{mine.name if mine else 'what is missing here'}, where {side}: build the same in every worker"
    return (
        f"{mine.name}, which is {mine.dtype}{list(mine.shape)} with strides {list(mine.stride)} here and"
        f" {theirs.dtype}{list(theirs.shape)} with strides {list(theirs.stride)} there: build the same in every worker"
    )


def _load_item(name: str, item: Stateful, node: Node, builder: Builder) -> None:
    own = item.state_dict()
    defaults = dict(getattr(item, "defaults", {}))
    try:
        item.load_state_dict(builder.build(name, node, own))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"load_state_dict of {name} does not take what state_dict of the workers that train gave: {error!r}"
        ) from error
    if isinstance(item, torch.optim.Optimizer):
        # Built anew, since load_state_dict may have changed the containers it was given.
        _put_back(item, builder.build(name, node, own))
        # torch adds to these, and so to groups that are added later, unlike on workers that loaded nothing.
        item.defaults = defaults


def _put_back(optimizer: torch.optim.Optimizer, sent: Any) -> None:
    """Give an optimizer its state with the original types: torch casts it to those of the parameters."""
    live = optimizer.state_dict()
    for key, values in sent.get("state", {}).items():
        mine = live["state"].get(key)
        # state_dict returns the very dict that the optimizer works with for each parameter.
        if isinstance(mine, dict) and isinstance(values, dict):
            exact = _exact(mine, values)
            mine.clear()
            mine.update(exact)


def _exact(mine: Any, theirs: Any) -> Any:
    """Return ``theirs`` on the devices of ``mine``; tensors that match stay."""
    if isinstance(theirs, torch.Tensor):
        if not isinstance(mine, torch.Tensor):
            return theirs
        if mine.dtype == theirs.dtype and same_bits(mine, theirs):
            return mine
        return theirs if local_of(theirs).device == local_of(mine).device else theirs.to(mine.device)
    if type(theirs) is dict:
        return {key: _exact(mine.get(key) if isinstance(mine, dict) else None, theirs[key]) for key in theirs}
    if type(theirs) in (list, tuple):
        counterparts = itertools.chain(mine if isinstance(mine, list | tuple) else (), itertools.repeat(None))
        return type(theirs)(_exact(own, each) for own, each in zip(counterparts, theirs, strict=False))
    return theirs


def _verify(header: Header, tensors: Sequence[torch.Tensor], after: State) -> None:
    """Compare the received state with what this worker would send now."""
    # Devices may differ.
    if msgspec.structs.replace(after.header, on_device=header.on_device) != header:
        for got, sent in itertools.zip_longest(flat_form(after.header), flat_form(header)):
            if got != sent:
                raise _not_restored((sent or got)[0])
    for entry, got_tensor, tensor in zip(header.entries, after.tensors, tensors, strict=True):
        if not same_bits(got_tensor, tensor):
            raise _not_restored(entry.name)


def _not_restored(name: str) -> ConfigError:
    return ConfigError(
        f"load_state_dict of {name.split('.')[0]} does not restore what its state_dict gave, first in {name}: a worker that"
        " joins would train with something else"
    )


def flat_form(header: Header) -> Iterator[tuple[str, Any]]:
    """Yield (name, content) for every tensor and value, so that two headers can be compared piece by piece."""
    for name, node in header.skeleton.items():
        yield from _flat_node(name, node)
    for entry in header.entries:
        yield entry.name, entry


def _flat_node(name: str, node: Node) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Table):
        yield name, (node.kind, node.keys)
        for key, value in zip(node.keys, node.values, strict=True):
            yield from _flat_node(f"{name}.{key}", value)
    elif isinstance(node, Items):
        yield name, (node.kind, len(node.items))
        for index, item in enumerate(node.items):
            yield from _flat_node(f"{name}.{index}", item)
    else:
        yield name, node
