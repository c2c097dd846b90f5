"""Detect a script that resumes from its own file without ``start_step``: its optimizer has state, its data starts over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from craft.snapshots.state.leaves import Stateful


def forgotten_start_step(registered: Mapping[str, Stateful]) -> str | None:
    """Return a warning if a registered optimizer or scheduler has stepped before the first step; else None.

    Pretrained weights come without such state.
    """
    for name, item in registered.items():
        if isinstance(item, torch.optim.Optimizer):
            steps = max((_steps_of(state) for state in item.state.values()), default=0)
        elif isinstance(item, torch.optim.lr_scheduler.LRScheduler):
            steps = _epochs_of(item)
        else:
            continue
        if steps > 0:
            return _warning(name, item, steps)
    return None


def _epochs_of(scheduler: torch.optim.lr_scheduler.LRScheduler) -> int:
    """Return how often a scheduler has stepped; a ``ChainedScheduler`` has no count, so use those inside it."""
    inside = getattr(scheduler, "_schedulers", ())
    return int(getattr(scheduler, "last_epoch", max(map(_epochs_of, inside), default=0)))


def _warning(name: str, item: Any, steps: int) -> str:
    done = f"has made {steps} steps" if _knows(item) else "has made steps"
    return (
        f"{name} ({type(item).__qualname__}) {done} already, and job.steps begins at step 0, with the first sample. If the script"
        " goes on from its own file, give job.steps(start_step=N) the number of steps that it had done"
    )


def _knows(item: Any) -> bool:
    """Return whether the count is of optimizer updates: SGD does not count, and schedulers may count epochs."""
    return isinstance(item, torch.optim.Optimizer) and any("step" in state for state in item.state.values())


def _steps_of(state: Any) -> int:
    """Return an optimizer's steps for one parameter; 1 if it does not count them."""
    if "step" in state:
        return int(state["step"])
    return int(isinstance(state.get("momentum_buffer"), torch.Tensor))
