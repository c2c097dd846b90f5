"""Try what a sharded replica of two workers refuses, and print each sentence: ``sharded_refusals.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
import torch.distributed as dist
from torch import nn
from torch.distributed import _symmetric_memory
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils.data import IterableDataset, TensorDataset

import craft

job = craft.join()
mesh = job.mesh(shard=2)
DATA = TensorDataset(torch.randn(64, 4), torch.randn(64, 4))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def whole() -> nn.Sequential:
    model = layers()
    fully_shard(model, mesh=mesh)
    return model


def train(model: nn.Module, data: Any = DATA, **options: Any) -> None:
    job._loops.modules.clear()
    job._loops.registered.clear()
    job.replicate(model)
    given: dict[str, Any] = {"global_batch": 8, "microbatches": 2, "steps": 2, "seed": 0} | options
    list(job.steps(data, **given))


def without_root() -> None:
    model = layers()
    fully_shard(model[0], mesh=mesh)
    train(model)


def tensors_of_another_kind() -> None:
    model = whole()
    model.register_parameter("scale", nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()])))
    train(model)


def optimizer_first() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model, mesh=mesh)
    job._loops.modules.clear()
    job.replicate(model)
    job.register(optimizer=optimizer)
    list(job.steps(DATA, global_batch=8, microbatches=2, steps=2))


def compiler() -> None:
    torch._inductor.config.bucket_all_gathers_fx = "all"
    try:
        train(whole())
    finally:
        torch._inductor.config.bucket_all_gathers_fx = "none"


def experts() -> None:
    rank = dist.get_rank()
    sent = [3, 1] if rank == 0 else [1, 3]
    dist.all_to_all_single(torch.empty(4), torch.empty(4), sent, sent)


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        while True:
            yield torch.zeros(4)


CASES: dict[str, Callable[[], Any]] = {
    "not sharded": lambda: train(layers()),
    "root left out": without_root,
    "other tensors": tensors_of_another_kind,
    "optimizer first": optimizer_first,
    "unsynced": lambda: whole().set_requires_gradient_sync(False),  # type: ignore[operator]
    "symmetric": lambda: _symmetric_memory.enable_symm_mem_for_group(
        dist.distributed_c10d._get_default_group().group_name
    ),
    "compiler": compiler,
    "experts": experts,
    "replicate": lambda: job.mesh(dp_replicate=2, shard=1),
    "process group": lambda: dist.init_process_group("gloo", rank=0, world_size=4),
    "sizes": lambda: train(whole(), global_batch=6),
    "last batch": lambda: train(whole(), TensorDataset(torch.randn(61, 4)), steps=None, epochs=1),
    "iterable": lambda: train(whole(), Endless()),
    "attempts": lambda: job.attempts(DATA, global_batch=8, steps=2),
    "checked names": lambda: train(whole(), split=("tp",)),
}
for name, case in CASES.items():
    try:
        case()
    except craft.ConfigError as error:
        print(f"{name}: {error}", flush=True)
    else:
        print(f"{name}: ACCEPTED", flush=True)
