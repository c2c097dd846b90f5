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


class _Watched:
    """An unregistered object, with ``position``, which changes when the loop steps it."""

    def __init__(self, thing: Any, position: Callable[[Any], Any], refusal: str, warning: str = "") -> None:
        self._thing = ref(thing)
        self._position = position
        self._before = position(thing)
        self._refusal = refusal
        self._warning = warning

    def check(self, warn: Callable[[str], None] | None) -> None:
        """Raise UnsafeScript if the object was stepped; else warn of it if it is alive and ``warn`` is given."""
        thing = self._thing()
        if thing is None:
            return
        if self._position(thing) != self._before:
            raise UnsafeScript(self._refusal)
        if warn is not None and self._warning:
            warn(self._warning)


class UnregisteredChecks:
    """The checks of one loop. The main thread calls ``search`` after the first step and ``check`` after each later one."""

    def __init__(self, optimizers: OptimizerChecks, modules_too: bool, warn: Callable[[str], None]) -> None:
        self._optimizers = optimizers
        self._modules_too = modules_too
        self._warn = warn
        self._warned = False
        self._watched: list[_Watched] = []
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
                self._watched.append(_watch_scheduler(each))
        for scaler in alive[torch.amp.GradScaler]:
            if scaler.is_enabled() and not self._optimizers.is_followed(scaler):
                self._watched.append(_watch_scaler(scaler))
        modules = alive[torch.nn.Module]
        for average in (each for each in modules if isinstance(each, AveragedModel)):
            followed = self._optimizers.is_followed(average) or any(
                map(self._optimizers.is_replicated, average.parameters())
            )
            if not followed:
                self._watched.append(_watch_average(average))
        if self._modules_too:
            outside = [each for each in modules if self._is_outside(each)]
            self._modules = [(ref(each), _digest(each), _digest(each, of_grads=True)) for each in outside]

    def _is_outside(self, module: torch.nn.Module) -> bool:
        own = [param for param in module._parameters.values() if param is not None]
        return any(param.grad is not None and not self._optimizers.is_replicated(param) for param in own)

    def check(self) -> None:
        """Raise UnsafeScript if an unregistered scheduler, scaler or average stepped; call it after each later step."""
        for each in self._watched:
            each.check(None if self._warned else self._warn)
        self._warned = True
        self._check_modules()

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


def _watch_scheduler(scheduler: LRScheduler) -> _Watched:
    kind, line = type(scheduler).__name__, _register_line(name_in_script(scheduler) or "scheduler")
    return _Watched(
        scheduler,
        lambda each: (getattr(each, "last_epoch", None), getattr(each, "num_bad_epochs", None)),
        f"the scheduler {kind} steps in the loop and is not registered: a worker that joins would train with another learning"
        f" rate. {line}",
        f"the scheduler {kind} of an optimizer of this loop is not registered. If the loop steps it later, the job ends then."
        f" {line}",
    )


def _watch_scaler(scaler: torch.amp.GradScaler) -> _Watched:
    return _Watched(
        scaler,
        lambda each: (each.get_scale(), each.state_dict()["_growth_tracker"]),
        "a GradScaler is updated in the loop and is not registered: a worker that joins would scale its losses by another"
        f" factor, and leave out other steps. {_register_line(name_in_script(scaler) or 'scaler')}",
    )


def _watch_average(average: AveragedModel) -> _Watched:
    return _Watched(
        average,
        # How often its counter was changed in place; reading the counter would wait for a GPU.
        lambda each: each.n_averaged._version,
        "an AveragedModel is updated in the loop and is not registered: a worker that joins, and a job that goes on from a"
        f" checkpoint, would average over other steps. {_register_line(name_in_script(average) or 'average')}",
    )


def _register_line(name: str) -> str:
    return f"Before job.steps add: job.register({name}={name})"


def _digest(module: torch.nn.Module, of_grads: bool = False) -> str:
    own = [(name, param.grad if of_grads else param) for name, param in module._parameters.items() if param is not None]
    return digest([Leaf(name, value.detach()) for name, value in own if value is not None])


def _called(module: torch.nn.Module) -> str:
    shapes = ", ".join(
        f"{name} {tuple(param.shape)}" for name, param in module._parameters.items() if param is not None
    )
    return f"a {type(module).__name__} ({shapes})"
