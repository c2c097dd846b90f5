"""A small model under FSDP2 and tensor parallel, and the same one in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from craft.groups.group import P2P
from craft.groups.sharded.install import mesh

from .replica import replica_of

WIDTH, BATCH, STEPS = 32, 16, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


def plain_model(outputs: int = 7) -> nn.Sequential:
    """Return the model; seven is a size that nothing divides."""
    torch.manual_seed(3)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, outputs))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, generator=source), torch.randn(BATCH, 8, generator=source)


def loss_of(model: nn.Module, step: int, part: int, parts: int) -> torch.Tensor:
    x, y = (each.chunk(parts)[part] for each in batch(step))
    out = model(x).float()
    return nn.functional.mse_loss(out, y[:, : out.shape[1]])


def whole(model: nn.Module) -> list[torch.Tensor]:
    """Return all parameters, gathered."""
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]


def shard(model: nn.Sequential, **settings: Any) -> nn.Sequential:
    for block in list(model)[:2]:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    return model


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, part: int, parts: int) -> float:
    optimizer.zero_grad()
    loss_of(model, step, part, parts).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def adamw(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **settings)


def train_alone(outputs: int) -> tuple[list[torch.Tensor], list[float]]:
    model = plain_model(outputs)
    optimizer = adamw(model)
    norms = [step_once(model, optimizer, step, 0, 1) for step in range(STEPS)]
    return whole(model), norms


def numpy(tensors: list[torch.Tensor]) -> list[Any]:
    """For the way between processes."""
    return [tensor.detach().numpy() for tensor in tensors]


def train_fsdp(group: P2P, settings: dict[str, Any], of_optimizer: dict[str, Any]) -> tuple[list[Any], list[float]]:
    replica = replica_of(group)
    shards = mesh(replica, torch.device("cpu"), shard=replica.size)
    model = shard(plain_model(), mesh=shards, **settings)
    optimizer = adamw(model, **of_optimizer)
    norms = [step_once(model, optimizer, step, replica.position, replica.size) for step in range(STEPS)]
    return numpy(whole(model)), norms


def _replicated(_: nn.Module, inputs: Any, tp: Any) -> Any:
    return tuple(DTensor.from_local(each, tp, [Replicate()]) for each in inputs)


def _local(_: nn.Module, output: Any, tp: Any) -> Any:
    return output.to_local()


def train_2d(group: P2P) -> tuple[list[Any], list[float]]:
    """Tensor parallel in each block, FSDP2 over it."""
    replica = replica_of(group)
    both = mesh(replica, torch.device("cpu"), shard=2, tp=2)
    model = plain_model(outputs=8)
    for block in list(model)[:2]:
        assert isinstance(block, Block)
        parallelize_module(block, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        distribute_module(block.norm, both["tp"], input_fn=_replicated, output_fn=_local)
    parallelize_module(model[2], both["tp"], ColwiseParallel(output_layouts=Replicate()))
    shard(model, mesh=both["shard"])
    optimizer = adamw(model)
    part = both["shard"].get_local_rank()
    norms = [step_once(model, optimizer, step, part, 2) for step in range(STEPS)]
    return numpy(whole(model)), norms
