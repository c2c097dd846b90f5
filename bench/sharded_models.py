"""The model and the data of the benchmarks of sharded jobs: the same for CRAFT, torch's own HSDP and torchft.

The network is that of ``models.py``, wider, so that what is spread over workers has some size: 3.4 million parameters. FSDP2
shards each of its layers. The labels can be learned, so that a loss at the end means something.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench.models import NUM_CLASSES, NUM_FEATURES, NUM_SAMPLES, Batch, build_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset

WIDTH = 1024
DEPTH = 4
REPLICAS = 2
SHARDS = 2
EVALUATED = 2048
"""Samples over which the loss of a finished model is computed."""


class Taught(Dataset[Batch]):
    """Random features, held in memory, and the labels that a fixed random layer gives them."""

    def __init__(self, size: int = NUM_SAMPLES) -> None:
        generator = torch.Generator().manual_seed(0)
        self._features = torch.randn(size, NUM_FEATURES, generator=generator)
        teacher = torch.randn(NUM_FEATURES, NUM_CLASSES, generator=generator)
        self._labels = (self._features @ teacher).argmax(dim=1)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Batch:
        return self._features[index], self._labels[index]

    def rows(self, indices: Sequence[int]) -> Batch:
        """Return several samples as one batch."""
        chosen = torch.tensor(indices)
        return self._features[chosen], self._labels[chosen]


def build_sharded(mesh: DeviceMesh, width: int = WIDTH, depth: int = DEPTH) -> nn.Module:
    """Return the network with FSDP2 over ``mesh``: each layer a unit, the last one with the root."""
    model = build_model(width=width, depth=depth)
    layers = [layer for layer in model.children() if isinstance(layer, nn.Linear)]
    for layer in layers[:-1]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def shard_bytes(width: int, depth: int = DEPTH) -> int:
    """Return the size of one worker's part of the gradient."""
    with torch.device("meta"):
        model = build_model(width=width, depth=depth)
    return sum(each.nbytes for each in model.parameters()) // SHARDS


def mean_by_sum(model: nn.Module) -> None:
    """Have FSDP2 sum and divide: Gloo computes no mean, and torch does not say so."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)


class Blocks:
    """The data order cut into blocks of one worker's batch: which samples worker ``rank`` of ``workers`` has in a step."""

    def __init__(self, dataset: Taught, samples: int, workers: int) -> None:
        """``samples``: of one worker and step."""
        self._dataset = dataset
        self._samples = samples
        self._workers = workers
        self._per_epoch = len(dataset) // (samples * workers)
        self._epoch, self._order = -1, list[int]()

    def batch(self, step: int, rank: int) -> Batch:
        """Return what ``rank`` computes in ``step``."""
        epoch, number = divmod(step, self._per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self._dataset), generator=generator).tolist()
        first = (number * self._workers + rank) * self._samples
        return self._dataset.rows(self._order[first : first + self._samples])


def save_shard(model: nn.Module, folder: Path, position: int) -> None:
    """Write this worker's part of the finished model, see ``final_loss``."""
    parameters: list[tuple[str, Any]] = list(model.named_parameters())
    # Twins write the same bits under the same name.
    part = folder / f"shard{position}.{os.getpid()}"
    torch.save({name: value.to_local().detach().clone() for name, value in parameters}, part)
    part.rename(folder / f"shard{position}.pt")


def final_loss(folder: Path) -> float:
    """Return the loss of the model whose shards are in ``folder``, over a fixed part of the data."""
    shards = [torch.load(folder / f"shard{position}.pt") for position in range(SHARDS)]
    model = build_model(width=WIDTH, depth=DEPTH)
    model.load_state_dict({name: torch.cat([shard[name] for shard in shards]) for name in shards[0]})
    features, labels = Taught().rows(range(EVALUATED))
    with torch.no_grad():
        return float(F.cross_entropy(model(features), labels))


class LocalState:
    """This worker's part of a sharded model and its optimizer, as plain tensors.

    It keeps references to the sharded parameters: ``model.state_dict()`` would free what FSDP2 has gathered, and torchft asks for
    the state on a thread of its manager while the main thread computes.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take a model whose forward has not begun."""
        self._parameters: list[tuple[str, Any]] = list(model.named_parameters())
        self._optimizer = optimizer

    def save(self) -> dict[str, Any]:
        """Return the state."""
        weights = {name: each.detach().to_local() for name, each in self._parameters}
        moments = tree_map_only(DTensor, lambda each: each.to_local(), self._optimizer.state_dict())
        return {"model": weights, "optimizer": moments}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Take over what ``save`` returned on a worker of the same position."""
        for name, each in self._parameters:
            each.to_local().copy_(state["model"][name])
        moments = state["optimizer"]["state"]
        moments = {n: {key: self._sharded(n, value) for key, value in each.items()} for n, each in moments.items()}
        self._optimizer.load_state_dict({**state["optimizer"], "state": moments})

    def _sharded(self, number: int, value: Any) -> Any:
        like = self._parameters[number][1]
        if not isinstance(value, torch.Tensor) or value.shape != like.to_local().shape:
            return value
        place = (like.device_mesh, like.placements)
        return DTensor.from_local(value, *place, run_check=False, shape=like.shape, stride=like.stride())
