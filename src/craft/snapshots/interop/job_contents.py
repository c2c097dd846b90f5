"""A job's own checkpoint as ``torch.distributed.checkpoint.load`` sees it: whole tensors, in the parts in which they were saved.

Keys are those of ``craft checkpoints export --format dcp``. Nothing but the parts that a plan asks for is read.
"""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from craft.snapshots.checkpoint.sharded.reshard import plan_whole
from craft.snapshots.checkpoint.sharded.saved_state import SavedTensor, ShardedState
from craft.snapshots.interop.named_values import nested_values
from craft.snapshots.state.raw_memory import DTYPES
from craft.snapshots.state.regions import Region
from craft.snapshots.state.tree import Array, Items, Node, Table
from craft.snapshots.store.manifest import Manifest
from craft.snapshots.store.tiers import Tiers


class JobContents:
    """The tensors and values of a job's checkpoint, by their flat keys."""

    def __init__(self, tiers: Tiers, manifest: Manifest) -> None:
        self.manifest = manifest
        self._saved = saved = ShardedState(tiers, manifest)
        self.parallel = saved.parallel
        with ThreadPoolExecutor(saved.parallel, "craft-dcp") as pool:
            plan = plan_whole(saved, pool)
            arrays = {number for node in plan.header.skeleton.values() for number in _arrays(node)}
            # Only forms, except of numpy's arrays, which become tensors.
            tensors = [
                saved.read_whole(wanted.tensor, pool)
                if number in arrays
                else torch.empty(wanted.tensor.shape, dtype=DTYPES[wanted.tensor.dtype], device="meta")
                for number, wanted in enumerate(plan.wanted)
            ]
        known = {id(tensor): wanted.tensor for tensor, wanted in zip(tensors, plan.wanted, strict=True)}
        flat, self._paths = flatten_state_dict(nested_values(plan.header, tensors, manifest))
        self._tensors: dict[str, SavedTensor] = {}
        self._values: dict[str, Any] = {}
        """What is not a tensor in the store."""
        for key, value in flat.items():
            if id(value) in known:
                self._tensors[key] = known[id(value)]
            else:
                self._values[key] = value
        self._order = {key: number for number, key in enumerate(flat)}

    def metadata(self) -> Metadata:
        """Return what planners need to know."""
        forms: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for key in self._order:
            saved, value = self._tensors.get(key), self._values.get(key)
            if saved is not None:
                forms[key] = _form(DTYPES[saved.dtype], saved.shape, [each.region for each in saved.sources])
            elif isinstance(value, torch.Tensor):
                forms[key] = _form(value.dtype, value.shape, [tuple(((0, size),) for size in value.shape)])
            else:
                forms[key] = BytesStorageMetadata()
        return Metadata(
            state_dict_metadata=forms,
            planner_data=self._paths,
            storage_data=self._order,
            version=getattr(filesystem, "CURRENT_DCP_VERSION", None),
        )

    def number(self, index: MetadataIndex) -> int:
        """Return the place of an item in the order of reading."""
        return self._order[index.fqn]

    def read(self, item: ReadItem, pool: ThreadPoolExecutor) -> torch.Tensor:
        """Return the part of a tensor that an item asks for, or the bytes of what is not a tensor."""
        index = item.storage_index
        if item.type == LoadItemType.BYTE_IO:
            data = io.BytesIO()
            torch.save(self._values[index.fqn], data)
            return torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)
        firsts = [first + more for first, more in zip(index.offset or (), item.storage_offsets, strict=False)]
        if index.fqn in self._values:
            found: torch.Tensor = self._values[index.fqn]
            for axis, (first, size) in enumerate(zip(firsts, item.lengths, strict=True)):
                found = found.narrow(axis, first, size)
            return found
        region = tuple(
            ((first, first + size),) if size else () for first, size in zip(firsts, item.lengths, strict=True)
        )
        return self._saved.read(self._tensors[index.fqn], region, pool)


def _arrays(node: Node) -> list[int]:
    """Return the entries of numpy's arrays."""
    if isinstance(node, Array):
        return [node.index]
    below = node.values if isinstance(node, Table) else node.items if isinstance(node, Items) else ()
    return [number for each in below for number in _arrays(each)]


def _form(dtype: torch.dtype, shape: Any, regions: list[Region]) -> TensorStorageMetadata:
    boxes = [box for region in regions for box in product(*region)]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=torch.Size(shape),
        chunks=[
            ChunkStorageMetadata(
                torch.Size([begin for begin, _ in box]), torch.Size([end - begin for begin, end in box])
            )
            for box in boxes
        ],
    )
