"""Refuse optimizers whose updates or state would not be the same on every worker.

torch calls a hook around every ``optimizer.step()`` of the process. An optimizer that passed the checks costs one look-up per
step from then on. ``ScriptChecks`` switches the hooks on and off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from craft.protocol.errors import UnsafeScript
from craft.snapshots.state.leaves import Stateful, registered_leaves
from craft.worker.checks.object_search import name_in_script, objects_alive, reaches, script_line
from craft.worker.state.metadata import named_parameters

_NAMED = 3
"""Parameters that a message names; it counts the rest."""


class OptimizerChecks:
    """Checks every optimizer that steps while the loop runs. Belongs to the main thread."""

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Module],
        registered: Mapping[str, Stateful],
        own_loop: bool,
        in_microbatch: Callable[[], bool],
    ) -> None:
        """``own_loop``: parameters may be registered state. ``in_microbatch``: whether the script computes a microbatch."""
        self.step = 0
        """The step that the script is in."""
        self._names = {id(param): name for name, param in named_parameters(modules)}
        self._registered = registered
        self._own_loop = own_loop
        self._in_microbatch = in_microbatch
        self._known: WeakSet[Optimizer] = WeakSet()
        self._made: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """By optimizer that was made while the loop ran, the step."""
        self._hooks = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        self._original = Optimizer._patch_step_function
        self._patched = self._patch(self._original)
        Optimizer._patch_step_function = self._patched  # type: ignore[method-assign, assignment]

    def close(self) -> None:
        """Remove every hook."""
        for hook in self._hooks:
            hook.remove()
        if Optimizer._patch_step_function is self._patched:
            Optimizer._patch_step_function = self._original  # type: ignore[method-assign]

    @property
    def known(self) -> Sequence[Optimizer]:
        """Optimizers that have stepped and passed the checks."""
        return tuple(self._known)

    def is_replicated(self, param: torch.Tensor) -> bool:
        return id(param) in self._names

    def is_followed(self, thing: Any) -> bool:
        """Whether ``thing`` is registered, itself or within a registered object."""
        return reaches(self._registered.values(), thing)

    def _patch(self, original: Callable[[Optimizer], None]) -> Callable[[Optimizer], None]:
        """Wrap what every optimizer calls when it is made, copied or unpickled."""

        def patched(optimizer: Optimizer) -> None:
            original(optimizer)
            self._made[optimizer] = self.step

        return patched

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if self._in_microbatch() and any(self.is_replicated(param) for param in _params_of(optimizer)):
            where = "attempt.microbatches(...)" if self._own_loop else "`for batch in step`"
            raise UnsafeScript(
                f"{_called(optimizer)} steps inside the loop over microbatches ({script_line()}): there it would use the"
                f" gradient of one microbatch, another one on every worker. Call optimizer.step() once per step, after {where}"
                " has ended: then p.grad is the mean over the global batch"
            )

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer not in self._known and self._made.get(optimizer) != self.step:
            self._judge(optimizer)
            self._known.add(optimizer)

    def _judge(self, optimizer: Optimizer) -> None:
        """Raise UnsafeScript unless what ``optimizer`` trains is replicated and its state is registered."""
        is_registered = _registered_tensors(self._registered)
        foreign = [
            param
            for param in _params_of(optimizer)
            if param.requires_grad and not (self.is_replicated(param) or (self._own_loop and is_registered(param)))
        ]
        if foreign:
            raise UnsafeScript(
                f"{_called(optimizer)} ({script_line()}) trains {_owners(foreign)}, which is in no module given to"
                " job.replicate: every worker would train its own. Before the optimizer is built add"
                f" {_replicate(foreign)}"
            )
        state = [value for each in optimizer.state.values() for value in each.values() if _is_tensor(value)]
        if self.is_followed(optimizer) or (state and all(map(is_registered, state))):
            return
        name = name_in_script(optimizer) or "optimizer"
        trained = [self._names.get(id(param), "") for param in _params_of(optimizer)]
        raise UnsafeScript(
            f"{_called(optimizer)} ({script_line()}) trains {_some([each for each in trained if each])} and is not"
            " registered: its state would not follow the job, and a worker that joins would train with another one."
            f" Before job.steps add: job.register({name}={name})"
        )


def _registered_tensors(registered: Mapping[str, Stateful]) -> Callable[[torch.Tensor], bool]:
    """Return whether a tensor is in the state of registered objects, by its address; the state is read on the first call."""

    @functools.cache
    def addresses() -> set[int]:
        leaves = registered_leaves(registered)
        return {leaf.value.data_ptr() for leaf in leaves if isinstance(leaf.value, torch.Tensor)}

    return lambda tensor: tensor.data_ptr() in addresses()


def _params_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 0


def _called(optimizer: Optimizer) -> str:
    return f"the optimizer {type(optimizer).__name__}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _owners(params: Sequence[torch.Tensor]) -> str:
    """Name parameters by the classes of their modules."""
    found = {id(param): f"a parameter of shape {tuple(param.shape)}" for param in params}
    for module in objects_alive(torch.nn.Module)[torch.nn.Module]:
        for name, param in module._parameters.items():
            if id(param) in found:
                found[id(param)] = f"{type(module).__name__}.{name} of shape {tuple(param.shape)}"
    return _some(list(found.values()))


def _replicate(params: Sequence[torch.Tensor]) -> str:
    """Return the missing line, with the script's name for the outermost module that has ``params``."""
    wanted = {id(param) for param in params}
    modules: list[torch.nn.Module] = objects_alive(torch.nn.Module)[torch.nn.Module]
    having = [each for each in modules if wanted <= {id(param) for param in each.parameters()}]
    for module in sorted(having, key=lambda each: sum(1 for _ in each.modules()), reverse=True):
        if name := name_in_script(module):
            return f"{name} = job.replicate({name})"
    return "module = job.replicate(module), with the module that has it"
