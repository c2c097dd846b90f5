"""Find what a loop trains or steps without registering it: schedulers, gradient scalers, averages and modules.

No hook shows them, so all objects of the process are searched once, after the first step. What is found (usually nothing) is
then checked by comparing a number or two per step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from craft.protocol.errors import UnsafeScript
from craft.snapshots.state.leaves import Leaf, digest
from craft.worker.checks.object_search import name_in_script, objects_alive
from craft.worker.checks.optimizers import OptimizerChecks

Position = tuple[Any, Any]


class UnregisteredChecks:
    """The checks of one loop. The main thread calls ``search`` after the first step and ``check`` after each later one."""

    def __init__(self, optimizers: OptimizerChecks, modules_too: bool, warn: Callable[[str], None]) -> None:
        self._optimizers = optimizers
        self._modules_too = modules_too
        self._warn = warn
        self._schedulers: list[tuple[ref[LRScheduler], Position, str]] = []
        """Unregistered schedulers of this loop's optimizers, their positions after the first step, their names in the script."""
        self._scalers: list[tuple[ref[torch.amp.GradScaler], Position, str]] = []
        """Unregistered gradient scalers, likewise."""
        self._averages: list[tuple[ref[AveragedModel], int, str]] = []
        """Unregistered averaged models, how often each had changed, their names in the script."""
        self._warned = False
        self._modules: list[tuple[ref[torch.nn.Module], str, str]] = []
        """Modules outside of the job that have gradients, with digests of their parameters and gradients after the first step."""

    def search(self) -> None:
        """Search all objects; call it after the update of the first step."""
        known = {id(each) for each in self._optimizers.known}
        alive = objects_alive(LRScheduler, torch.amp.GradScaler, torch.nn.Module)
        schedulers = alive[LRScheduler]
        parts = {id(part) for each in schedulers for part in getattr(each, "_schedulers", ())}
        for each in schedulers:
            trained = id(getattr(each, "optimizer", None)) in known
            if trained and id(each) not in parts and not self._optimizers.is_followed(each):
                self._schedulers.append((ref(each), _position(each), name_in_script(each)))
        for scaler in alive[torch.amp.GradScaler]:
            if scaler.is_enabled() and not self._optimizers.is_followed(scaler):
                self._scalers.append((ref(scaler), _scale_of(scaler), name_in_script(scaler) or "scaler"))
        modules = alive[torch.nn.Module]
        for average in (each for each in modules if isinstance(each, AveragedModel)):
            followed = self._optimizers.is_followed(average) or any(
                map(self._optimizers.is_replicated, average.parameters())
            )
            if not followed:
                self._averages.append((ref(average), _changes(average), name_in_script(average) or "average"))
        if self._modules_too:
            outside = [each for each in modules if self._is_outside(each)]
            self._modules = [(ref(each), _digest(each), _digest(each, of_grads=True)) for each in outside]

    def _is_outside(self, module: torch.nn.Module) -> bool:
        own = [param for param in module._parameters.values() if param is not None]
        return any(param.grad is not None and not self._optimizers.is_replicated(param) for param in own)

    def check(self) -> None:
        """Raise UnsafeScript if an unregistered scheduler, scaler or average stepped; call it after each later step."""
        if self._schedulers:
            self._check_schedulers()
        if self._scalers:
            self._check_scalers()
        if self._averages:
            self._check_averages()
        if self._modules:
            self._check_modules()

    def _check_schedulers(self) -> None:
        for found, before, name in self._schedulers:
            scheduler = found()
            if scheduler is None:
                continue
            if _position(scheduler) != before:
                raise UnsafeScript(
                    f"the scheduler {type(scheduler).__name__} steps in the loop and is not registered: a worker that joins"
                    f" would train with another learning rate. Before job.steps add: {_line(name)}"
                )
            if not self._warned:
                self._warn(
                    f"the scheduler {type(scheduler).__name__} of an optimizer of this loop is not registered. If the loop"
                    f" steps it later, the job ends then. Before job.steps add: {_line(name)}"
                )
        self._warned = True

    def _check_scalers(self) -> None:
        for found, before, name in self._scalers:
            scaler = found()
            if scaler is not None and _scale_of(scaler) != before:
                raise UnsafeScript(
                    "a GradScaler is updated in the loop and is not registered: a worker that joins would scale its losses by"
                    f" another factor, and leave out other steps. Before job.steps add: job.register({name}={name})"
                )

    def _check_averages(self) -> None:
        for found, before, name in self._averages:
            average = found()
            if average is not None and _changes(average) != before:
                raise UnsafeScript(
                    "an AveragedModel is updated in the loop and is not registered: a worker that joins, and a job that goes on"
                    f" from a checkpoint, would average over other steps. Before job.steps add: job.register({name}={name})"
                )

    def _check_modules(self) -> None:
        modules, self._modules = self._modules, []
        for found, params, grads in modules:
            module = found()
            # A module that was trained before the loop has gradients as well, but they do not change. This is no proof: a copy
            # for an evaluation may get other parameters and gradients in every step.
            if module is None or _digest(module, of_grads=True) == grads or _digest(module) == params:
                continue
            self._warn(
                f"{_called(module)} gets gradients and changes in the loop, and was not given to job.replicate: if the loop"
                " trains it, every worker trains its own. Before job.steps add: module = job.replicate(module)"
            )


def _position(scheduler: LRScheduler) -> Position:
    return getattr(scheduler, "last_epoch", None), getattr(scheduler, "num_bad_epochs", None)


def _scale_of(scaler: torch.amp.GradScaler) -> Position:
    return scaler.get_scale(), scaler.state_dict()["_growth_tracker"]


def _changes(average: AveragedModel) -> int:
    """Return how often its counter was changed in place; reading the counter would wait for a GPU."""
    return average.n_averaged._version


def _line(name: str) -> str:
    return f"job.register({name or 'scheduler'}={name or 'scheduler'})"


def _digest(module: torch.nn.Module, of_grads: bool = False) -> str:
    own = [(name, param.grad if of_grads else param) for name, param in module._parameters.items() if param is not None]
    return digest([Leaf(name, value.detach()) for name, value in own if value is not None])


def _called(module: torch.nn.Module) -> str:
    shapes = ", ".join(
        f"{name} {tuple(param.shape)}" for name, param in module._parameters.items() if param is not None
    )
    return f"a {type(module).__name__} ({shapes})"
