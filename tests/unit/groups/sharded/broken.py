"""What runs in the processes of the tests of a reset."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from craft.groups.group import P2P
from craft.groups.sharded import fsdp_reset
from craft.groups.sharded.install import mesh

from .models import adamw, loss_of, numpy, plain_model, shard, step_once, whole
from .replica import OneGroup, replica_of


def train_after_break(group: P2P, how: str, after: int, by_hand: bool, settings: dict[str, Any]) -> list[Any]:
    """Train a step, break off the next one, reset, and do it again; ``how`` is "", "echo" or "raise"."""
    replica = replica_of(group)
    model = shard(plain_model(), mesh=mesh(replica, torch.device("cpu"), shard=replica.size), **settings)
    optimizer = adamw(model)
    place = replica.position, replica.size
    if after >= 0:
        step_once(model, optimizer, 0, *place)
    if how:
        _break_off(replica, model, how, max(after, 0))
        _reset(model, by_hand)
        replica.mend()
    if after < 0:
        step_once(model, optimizer, 0, *place)
    for step in (1, 2):
        step_once(model, optimizer, step, *place)
    return numpy(whole(model))


def _break_off(replica: OneGroup, model: nn.Module, how: str, after: int) -> None:
    replica.mend()
    if how == "echo":
        replica.break_after = after
    else:
        replica.raise_after = after
    try:
        loss_of(model, 9, replica.position, replica.size).backward()
    except InterruptedError:
        assert how == "raise"


def _reset(model: nn.Module, by_hand: bool) -> None:
    if by_hand:
        states: list[Any] = [each._get_fsdp_state() for each in model.modules() if isinstance(each, FSDPModule)]
        fsdp_reset.reset_by_hand(next(state for state in states if state._is_root), states)
        for state in states:
            for group in fsdp_reset._groups(state):
                fsdp_reset._clear(group)
    else:
        fsdp_reset.reset([model])
    assert all(param.grad is None for param in model.parameters())


def operations_of_a_step(group: P2P) -> list[str]:
    """Return the names of what a forward and a backward run."""
    replica = replica_of(group)
    model = shard(plain_model(), mesh=mesh(replica, torch.device("cpu"), shard=replica.size))
    for _ in range(2):
        replica.mend()
        loss_of(model, 0, replica.position, replica.size).backward()
    return list(replica.names)
