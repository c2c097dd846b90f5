"""Refuse models whose workers would train apart: samples are divided between them, and gradients are not combined.

Input: the modules of a job, as the script sharded them, and how samples are divided. A worker at another position computes other
samples; only ``fully_shard`` over the dimensions that divide them makes one gradient of the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from craft.groups.sharded.refusals import check_compiler
from craft.protocol.errors import ConfigError
from craft.snapshots.state.shards import is_sharded
from craft.worker.data.data_split import DataSplit


def check_sharding(modules: Mapping[str, torch.nn.Module], split: DataSplit) -> None:
    """Raise ConfigError if a trained parameter gets different gradients at the positions of a replica."""
    check_compiler()
    if split.parts == 1:
        return
    reduced = _reduced_over(modules.values())
    for job_name, module in modules.items():
        for name, param in module.named_parameters():
            if not param.requires_grad:
                continue
            ranks = reduced.get(id(param))
            if ranks is None:
                raise ConfigError(_not_reduced(f"{job_name}.{name}", param))
            if not ranks.issuperset(split.mates):
                raise ConfigError(
                    f"{job_name}.{name} is sharded by fully_shard over a mesh that does not contain all dimensions over which"
                    " samples are divided, so that its gradient would be that of some of them only: give fully_shard a mesh of"
                    " all of these dimensions, or name fewer in job.steps(split=...)"
                )


def _not_reduced(name: str, param: torch.nn.Parameter) -> str:
    what = "a DTensor that fully_shard does not know" if is_sharded(param) else "not sharded"
    return (
        f"{name} is {what}, and the samples of a microbatch are divided between the workers of a replica: each would train"
        " it on its own samples. Give fully_shard the whole model, its root included (fully_shard(model, mesh=...)); or, if"
        " all workers of the replica compute the same samples (tensor parallel only), name its dimensions otherwise than shard"
        " in job.mesh(...), or pass job.steps(split=())"
    )


def _reduced_over(modules: Iterable[torch.nn.Module]) -> dict[int, frozenset[int]]:
    """Return the positions over which FSDP2 reduces the gradient of each parameter, by its id."""
    from torch.distributed.fsdp import FSDPModule

    found: dict[int, frozenset[int]] = {}
    for module in modules:
        for part in module.modules():
            if not isinstance(part, FSDPModule):
                continue
            state: Any = part._get_fsdp_state()
            # Before torch 2.13 a module has one group of parameters, or none.
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            for group in filter(None, groups):
                ranks = frozenset(group.mesh_info.mesh.mesh.flatten().tolist())
                found |= {id(each.sharded_param): ranks for each in group.fsdp_params}
    return found


def own_statistics(modules: Iterable[torch.nn.Module], split: DataSplit) -> str | None:
    """Return a warning if batch norm keeps other statistics at each position of a replica, as it does under FSDP2 alone."""
    norms = torch.nn.modules.batchnorm._BatchNorm
    found = any(isinstance(part, norms) and part.track_running_stats for module in modules for part in module.modules())
    if split.parts == 1 or not found:
        return None
    return (
        f"the model has batch norm, and the samples of a microbatch are divided between {split.parts} workers: each normalizes"
        " its own part, and keeps its own running statistics, as under FSDP2 without CRAFT. In eval() they compute different"
        " numbers; with LayerNorm, RMSNorm or GroupNorm they do not"
    )
