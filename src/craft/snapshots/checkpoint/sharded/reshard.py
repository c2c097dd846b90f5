"""Restore a checkpoint of a sharded model: at the mesh that saved it, at any other one, or as whole tensors.

At the same mesh each worker reads the state of its position, bit for bit. At another one it reads, tensor by tensor, the region
that its own objects hold, and gets a state as if a worker with its mesh had saved it. The objects here say how each tensor is
placed: parameters and buffers do, the state of an optimizer is placed like its parameter, other tensors like their counterparts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec
import torch

from craft.protocol.errors import ConfigError
from craft.snapshots.checkpoint.catalog import fetch_header
from craft.snapshots.checkpoint.restore import Restored, restore
from craft.snapshots.checkpoint.sharded.saved_state import SavedTensor, ShardedState
from craft.snapshots.state.index import ByteLayout, TensorEntry
from craft.snapshots.state.leaves import Stateful
from craft.snapshots.state.regions import Region, shape_of, whole
from craft.snapshots.state.serialized import Header, State, decode_header
from craft.snapshots.state.shards import Placement, is_sharded, module_shards, placement_of, region_in, reshard
from craft.snapshots.state.tree import Array, Items, Node, Packer, Sharded, Table, Tensor
from craft.snapshots.store.manifest import Manifest
from craft.snapshots.store.tiers import Tiers

Progress = Callable[[int], None]

_OPTIONS = ("foreach", "fused")
"""Options of optimizers that are no state: which kernels they use. Not all of them work with every mesh."""
_IN_GROUPS = object()


class Target(NamedTuple):
    """The worker that restores: its objects, and its position in a replica of ``size`` workers."""

    modules: Mapping[str, torch.nn.Module]
    registered: Mapping[str, Stateful]
    position: int = 0
    size: int = 1


def restore_into(tiers: Tiers, manifest: Manifest, target: Target, *, in_place: bool) -> Restored:
    """Read what ``target`` needs of a checkpoint, for ``serialized.load``.

    ``in_place``: parameters and buffers may be overwritten already; after an error their content is then undefined. Raises
    SnapshotMissing or SnapshotCorrupt, and ConfigError if the objects do not match.
    """
    reshard(target.modules.values())
    parts = manifest.by_position()
    if len(parts) == target.size:
        part = parts[target.position]
        header = decode_header(fetch_header(tiers, part))
        if (header.shards or {}) == module_shards(target.modules):
            return restore(tiers, part, target.modules if in_place else None)._replace(manifest=manifest)
    saved = ShardedState(tiers, manifest)
    with ThreadPoolExecutor(saved.parallel, "craft-restore") as pool:
        return read_plan(_Resharding(saved, target, pool).plan(), saved, pool)


def restore_whole(
    tiers: Tiers, manifest: Manifest, progress: Progress | None = None, *, registered: bool = True
) -> Restored:
    """Read a checkpoint as whole tensors, which need no mesh; of a sharded one perhaps without ``registered`` objects."""
    parts = manifest.by_position()
    header = decode_header(fetch_header(tiers, parts[0]))
    if len(parts) == 1 and not header.shards:
        return restore(tiers, manifest, progress=progress)
    saved = ShardedState(tiers, manifest)
    with ThreadPoolExecutor(saved.parallel, "craft-export") as pool:
        return read_plan(plan_whole(saved, pool, registered=registered), saved, pool, progress)


class Wanted(NamedTuple):
    """A tensor of the state that is made."""

    tensor: SavedTensor
    region: Region


class Plan(NamedTuple):
    """A state that can be read."""

    header: Header
    wanted: list[Wanted]
    """By the numbers of the header's entries."""


def plan_whole(saved: ShardedState, pool: ThreadPoolExecutor, *, registered: bool = True) -> Plan:
    """Return how to read a checkpoint as whole tensors, perhaps without ``registered`` objects."""
    return _Resharding(saved, None, pool).plan(registered=registered)


def read_plan(plan: Plan, saved: ShardedState, pool: ThreadPoolExecutor, progress: Progress | None = None) -> Restored:
    """Read a planned state, tensor by tensor."""
    tensors = []
    for entry, (tensor, region) in zip(plan.header.entries, plan.wanted, strict=True):
        local = saved.read(tensor, region, pool)
        if entry.stride != local.stride():
            local = torch.empty_strided(entry.shape, entry.stride, dtype=local.dtype).copy_(local)
        tensors.append(local)
        if progress is not None:
            progress(local.nbytes)
    return Restored(plan.header, tensors, saved.manifest, resharded=True)


class _Resharding:
    """Plans the state of one worker from those of all positions."""

    def __init__(self, saved: ShardedState, target: Target | None, pool: ThreadPoolExecutor) -> None:
        """``target``: None for whole tensors."""
        self._saved = saved
        self._target = target
        self._pool = pool
        self._entries: list[TensorEntry] = []
        self._wanted: list[Wanted] = []
        self._on_device: list[int] = []

    def plan(self, *, registered: bool = True) -> Plan:
        """Plan everything, or everything but ``registered`` objects."""
        first = self._saved.first
        here = State(self._target.modules, {}, b"").header if self._target is not None else None
        if here is not None:
            self._modules_here(here)
        else:
            for number in range(first.module_entries):
                tensor = self._saved.module_tensor(number, self._pool)
                self._add(tensor, whole(tensor.shape))
        num_module_entries = len(self._entries)
        skeleton = {name: self._item(name) for name in first.skeleton if registered}
        header = Header(
            entries=tuple(self._entries),
            module_entries=num_module_entries,
            skeleton=skeleton,
            names=here.names if here is not None else first.names,
            conditions=first.conditions,
            total_bytes=ByteLayout(self._entries).total_bytes,
            on_device=tuple(self._on_device),
            shards=here.shards if here is not None else msgspec.UNSET,
            buffers=here.buffers if here is not None else msgspec.UNSET,
        )
        return Plan(header, self._wanted)

    def _modules_here(self, here: Header) -> None:
        theirs = self._saved.first.entries[: self._saved.first.module_entries]
        for mine, other in zip_longest(here.entries, theirs):
            if mine is None or other is None or mine.name != other.name:
                there, own = (each.name if each is not None else "nothing" for each in (other, mine))
                raise ConfigError(
                    f"the modules do not match checkpoint {self._saved.manifest.name}, first in {own} here, where it has {there}:"
                    " build the same model"
                )
        for number, entry in enumerate(here.entries):
            placement = (here.shards or {}).get(number)
            region = region_in(placement, entry.shape)
            tensor = self._saved.module_tensor(number, self._pool)
            shape = placement.shape if placement is not None else entry.shape
            if (tensor.dtype, tensor.shape) != (entry.dtype, shape) or region is None:
                raise ConfigError(
                    f"the modules do not match checkpoint {self._saved.manifest.name}, first in {entry.name}, which is"
                    f" {entry.dtype}{list(shape)} here and {tensor.dtype}{list(tensor.shape)} there: build the same model"
                )
            self._add(tensor, region, entry.stride)
        self._on_device += here.on_device

    def _add(self, tensor: SavedTensor, region: Region, stride: Sequence[int] | None = None) -> int:
        """Add a region of a tensor, in row-major order by default; return the number of its entry."""
        shape = shape_of(region)
        strides = tuple(stride if stride is not None else torch.empty(shape, device="meta").stride())
        self._entries.append(TensorEntry(tensor.name, tensor.dtype, shape, strides))
        self._wanted.append(Wanted(tensor, region))
        return len(self._entries) - 1

    # Registered objects.

    def _item(self, name: str) -> Node:
        nodes = [header.skeleton[name] for header in self._saved.headers]
        item = self._target.registered.get(name) if self._target is not None else None
        likes: Any = None
        if isinstance(item, torch.optim.Optimizer):
            params = [param for group in item.param_groups for param in group["params"]]
            likes = {"state": dict(enumerate(params)), "param_groups": _IN_GROUPS}
        return self._node(name, nodes, item.state_dict() if item is not None else None, likes)

    def _node(self, name: str, nodes: Sequence[Node], own: Any, like: Any) -> Node:
        """Return what every position has at one place, for this worker.

        ``own``: the counterpart here, if any. ``like``: the parameter whose state this is, or a table of such, or that this is in
        a group of parameters.
        """
        below = self._saved.below(name, nodes)
        first = nodes[0]
        if below is not None:
            found = tuple(
                self._node(f"{name}.{key}", each, _down(own, key), like.get(key) if type(like) is dict else like)
                for key, each in below
            )
            if isinstance(first, Table):
                return Table(first.kind, first.keys, found)
            assert isinstance(first, Items)
            return Items(first.kind, found)
        if like is _IN_GROUPS and name.rpartition(".")[2] in _OPTIONS:
            return Packer().pack(name, own)
        if not isinstance(first, Tensor | Sharded | Array):
            return self._saved.same_value(name, nodes)
        tensor = self._saved.tensor(nodes, name, self._pool)
        if isinstance(first, Array):
            forms = [msgspec.structs.replace(each, index=0) for each in nodes if isinstance(each, Array)]
            self._saved.same_value(name, forms)
            return msgspec.structs.replace(first, index=self._add(tensor, whole(tensor.shape)))
        placement = self._placement(tensor, own, like)
        region = region_in(placement, tensor.shape)
        if region is None:
            raise self._unknown(tensor)
        number = self._add(tensor, region)
        if first.index in self._saved.first.on_device:
            self._on_device.append(number)
        return Tensor(number) if placement is None else Sharded(number, placement)

    def _placement(self, tensor: SavedTensor, own: Any, like: Any) -> Placement | None:
        """Return how a tensor of a registered object is placed here; None: it is whole."""
        for each in (own, like):
            if isinstance(each, torch.Tensor) and tuple(each.shape) == tensor.shape:
                return placement_of(each) if is_sharded(each) else None
        if self._target is None or self._target.size == 1:
            return None
        if tensor.is_sharded or (tensor.shape and is_sharded(like)):
            raise self._unknown(tensor)
        return None

    def _unknown(self, tensor: SavedTensor) -> ConfigError:
        return ConfigError(
            f"{tensor.name} of checkpoint {self._saved.manifest.name} is a tensor of {list(tensor.shape)}, and nothing here says"
            " how to divide it among the workers of a replica: go on with the same mesh and the same --workers-per-replica"
        )


def _down(value: Any, key: str | int) -> Any:
    """Return the item of a table or list; None if there is none."""
    if isinstance(value, Mapping):
        return value.get(key)
    if isinstance(value, list | tuple) and isinstance(key, int) and key < len(value):
        return value[key]
    return None
