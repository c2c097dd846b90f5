"""Bring FSDP2 modules back to their sharded state after a forward or a backward that was broken off."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState


def reset(modules: Iterable[nn.Module]) -> None:
    """Discard all that an iteration left in these modules: the next forward runs as if it had never begun.

    Gradients are discarded, too. Nothing is communicated. Modules without FSDP2 stay as they are.
    """
    # Each context is shared by the modules below one root.
    contexts: dict[int, list[Any]] = {}
    for module in modules:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                state: Any = part._get_fsdp_state()
                known = contexts.setdefault(id(state._state_ctx), [])
                # A context lists its modules from the first forward on.
                known += [each for each in (state, *state._state_ctx.all_states) if each not in known]
    for states in contexts.values():
        _reset_root(states)
        for state in states:
            for group in _groups(state):
                _clear(group)


def reshard(modules: Iterable[nn.Module]) -> None:
    """Free gathered parameters: their modules show the sharded ones again, as the state is read from them.

    A forward without a backward, as in an evaluation, leaves those of the root module gathered. Nothing is communicated.
    """
    for module in modules:
        for part in module.modules():
            if isinstance(part, FSDPModule) and any(each.is_unsharded for each in _groups(part._get_fsdp_state())):
                part.reshard()


def _reset_root(states: list[Any]) -> None:
    root = next((state for state in states if state._is_root), None)
    if root is None:
        # No forward has begun yet.
        return
    if hasattr(root, "_reset_iter_state"):
        root._reset_iter_state()
    else:
        reset_by_hand(root, states)


def reset_by_hand(root: Any, states: list[Any]) -> None:
    """Do what ``FSDPModule.reset_iter_state`` does, which torch has from 2.13 on."""
    shared = root._comm_ctx
    current = root._device_handle.current_stream()
    for name in ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream"):
        if (stream := getattr(shared, name, None)) is not None:
            current.wait_stream(stream)
    shared.all_gather_state = None
    shared.post_forward_order.clear()
    # Before 2.13 there is one state, and no list of events.
    if hasattr(shared, "reduce_scatter_states"):
        shared.reduce_scatter_states.clear()
        shared._last_post_reduce_events.clear()
    else:
        shared.reduce_scatter_state = None
    for state in states:
        # The modules of fully_shard([a, b]) of which the forward has run.
        if (run := getattr(state, "_modules_to_run_forward", None)) is not None:
            run.clear()
        state._training_state = TrainingState.IDLE
        for group in _groups(state):
            group._all_gather_result = None
            group._post_reduce_event = None
            group._all_reduce_state = None
            group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def _groups(state: Any) -> list[Any]:
    """Return the groups of parameters; before 2.13 a module has one or none."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _clear(group: Any) -> None:
    """Discard gradients, and what an all-gather has allocated before it broke."""
    group._to_sharded()
    for param in group.fsdp_params:
        param.free_unsharded_param()
        param.grad_offload_event = None
        param.unsharded_accumulated_grad = None
        param.sharded_param.grad = None
        unsharded = getattr(param, "_unsharded_param", None)
        if isinstance(unsharded, torch.Tensor):
            unsharded.grad = None
