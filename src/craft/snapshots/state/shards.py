"""Sharded tensors (DTensors) as what this worker has of them: a local tensor, and how it is placed.

Everything that reads or writes the training state works on local tensors. Only where an object's ``load_state_dict`` needs a
DTensor again, ``whole_like`` makes one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from craft.protocol.errors import ConfigError
from craft.snapshots.state.regions import Region, region_of, shape_of, whole


class Placement(msgspec.Struct, frozen=True, array_like=True):
    """How a local tensor is placed in a whole one; the same on all twins."""

    shape: tuple[int, ...]
    """Shape and strides of the whole tensor."""
    stride: tuple[int, ...]
    mesh: tuple[tuple[str, int], ...]
    """Name and size of each dimension of its mesh."""
    placements: tuple[str, ...]
    """One for each dimension of the mesh, as torch writes them."""
    region: Region | None = None
    """What the local tensor holds of the whole one; None: parts of sums, or not recorded."""


def is_sharded(value: object) -> bool:
    """Return whether ``value`` is a DTensor."""
    # Without an import, which takes a while: where the module is not loaded, there are no DTensors.
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(value, tensors.DTensor)


def reshard(modules: Iterable[torch.nn.Module]) -> None:
    """Have FSDP2 give up whole parameters that a forward without a backward left: state is read as shards."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for module in modules:
        for part in module.modules():
            if isinstance(part, fsdp.FSDPModule):
                part.reshard()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, which shares its memory; any other tensor itself."""
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def placement_of(tensor: Any) -> Placement:
    """Return the placement of a DTensor."""
    mesh, shape, placements = tensor.device_mesh, tuple(tensor.shape), tuple(map(str, tensor.placements))
    region = region_of(shape, tuple(mesh.shape), tuple(mesh.get_coordinate()), placements)
    if region is not None and shape_of(region) != tuple(tensor._local_tensor.shape):
        # Divided in a way that is not known here: it can be sent to twins, and restored on the same mesh.
        region = None
    return Placement(shape, tuple(tensor.stride()), _key(mesh), placements, region)


def module_shards(modules: Mapping[str, torch.nn.Module]) -> dict[int, Placement]:
    """Return the placement of sharded parameters and buffers, by their number in ``leaves.module_leaves``."""
    tensors = [each for module in modules.values() for _, each in (*module.named_parameters(), *module.named_buffers())]
    return {number: placement_of(each) for number, each in enumerate(tensors) if is_sharded(each)}


def region_in(placement: Placement | None, shape: Sequence[int]) -> Region | None:
    """Return what a tensor of local ``shape`` holds of the whole one; all of it if it has no placement."""
    if placement is None or (placement.region is None and placement.shape == tuple(shape) and _is_alone(placement)):
        return whole(shape)
    return placement.region


def _is_alone(placement: Placement) -> bool:
    """Return whether its mesh has one worker."""
    return all(size == 1 for _, size in placement.mesh)


def placed(local: torch.Tensor, like: Any) -> torch.Tensor:
    """Return ``local`` as a DTensor that is placed like the DTensor ``like``."""
    return _from_local(local, like.device_mesh, like.placements, like.shape, like.stride())


class Meshes:
    """The meshes of this worker's model, by the names and sizes of their dimensions."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._meshes: dict[tuple[tuple[str, int], ...], Any] = {}
        self._placements: dict[str, Any] = {"R": None}
        for tensor in tensors:
            if is_sharded(tensor):
                self._meshes.setdefault(_key(tensor.device_mesh), tensor.device_mesh)  # type: ignore[attr-defined]
                for each in tensor.placements:  # type: ignore[attr-defined]
                    self._placements[str(each)] = each

    def placed(self, name: str, local: torch.Tensor, placement: Placement) -> torch.Tensor:
        """Return ``local`` as a DTensor; raise ConfigError if the model has no such mesh."""
        mesh = self._meshes.get(placement.mesh)
        if mesh is None:
            raise ConfigError(
                f"{name} is sharded over the mesh {dict(placement.mesh)} on the workers that train, and the model here has no"
                " parameter on such a mesh: build the same model in every worker"
            )
        placements = [self._placement(each) for each in placement.placements]
        return _from_local(local, mesh, placements, torch.Size(placement.shape), placement.stride)

    def _placement(self, text: str) -> Any:
        from torch.distributed.tensor import Replicate, Shard

        known = self._placements.get(text)
        if known is not None:
            return known
        return Replicate() if text == "R" else Shard(int(text.removeprefix("S(").removesuffix(")")))


def _key(mesh: Any) -> tuple[tuple[str, int], ...]:
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    return tuple((str(name), int(size)) for name, size in zip(names, mesh.shape, strict=True))


def _from_local(local: torch.Tensor, mesh: Any, placements: Any, shape: Any, stride: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    whole: torch.Tensor = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )
    return whole
