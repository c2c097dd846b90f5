"""State that no ``state_dict`` has: it travels beside the tensors, to workers that join and into checkpoints.

``Attached`` is what travels: the conditions that every worker must share, the progress of the loop, and the modes of modules.
``ExtraState`` wraps what modules give by ``get_extra_state``, so that it is registered like an optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch

from craft.snapshots.state.leaves import Stateful
from craft.worker.data.sample_order import Position


class Conditions(msgspec.Struct, frozen=True):
    """What must be the same on every worker for results to be bit-identical."""

    device: str
    torch_version: str
    num_threads: int
    deterministic: bool
    settings: dict[str, int | float | str | bool | None]
    """Settings of the job: seed, microbatches, batch size, ..."""

    @classmethod
    def here(cls, device: torch.device, settings: dict[str, int | float | str | bool | None]) -> Conditions:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return cls(
            device=name,
            torch_version=str(torch.__version__),
            num_threads=torch.get_num_threads(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            settings=settings,
        )


class ModuleModes(msgspec.Struct, frozen=True):
    """Modes that differ from torch's defaults, by name. Code between the steps may change them."""

    frozen: tuple[str, ...] = ()
    """Parameters with ``requires_grad=False``."""
    evaluating: tuple[str, ...] = ()
    """Modules in ``eval()`` mode."""
    groups: dict[str, tuple[tuple[str, ...], ...]] = {}
    """Parameters of each group, by the name of the registered optimizer."""

    @classmethod
    def of(cls, modules: Mapping[str, torch.nn.Module], registered: Mapping[str, Stateful]) -> ModuleModes:
        """Read the current modes."""
        names = {id(param): name for name, param in named_parameters(modules)}
        return cls(
            groups={
                key: tuple(tuple(names.get(id(param), "") for param in group["params"]) for group in item.param_groups)
                for key, item in _optimizers(registered)
            },
            frozen=tuple(name for name, param in named_parameters(modules) if not param.requires_grad),
            evaluating=tuple(name for name, module in _modules(modules) if not module.training),
        )

    def put(self, modules: Mapping[str, torch.nn.Module], registered: Mapping[str, Stateful]) -> None:
        """Apply these modes and parameter groups; call it before a state is loaded."""
        frozen, evaluating = frozenset(self.frozen), frozenset(self.evaluating)
        for name, param in named_parameters(modules):
            if param.requires_grad == (name in frozen):
                param.requires_grad_(name not in frozen)
        for name, module in _modules(modules):
            module.training = name not in evaluating
        params = dict(named_parameters(modules))
        for key, item in _optimizers(registered):
            wanted = self.groups.get(key, ())
            if all(name in params for group in wanted for name in group):
                del item.param_groups[len(wanted) :]
                for group in wanted[len(item.param_groups) :]:
                    item.add_param_group({"params": [params[name] for name in group]})


class TrainingProgress(msgspec.Struct, frozen=True):
    """Where the loop is: its place in the data, and what divergence changed."""

    skipped: int = 0
    """Steps' worth of data that rollbacks left out."""
    lowered_until: int = 0
    """Learning rates are lowered up to this step."""
    loop: int = 1
    """Number of the script's training loop, from 1."""
    first_step: int = 0
    """Number of that loop's first step."""
    spoiled: bool = False
    """Whether code after the loop changed the state before it was sent to a worker that will run this code again."""
    recent: tuple[float, ...] = ()
    """Newest values of the metric that is checked for spikes."""
    stop: str | None = None
    """Why the script asked the job to stop after the next step, if it did: a job that resumes here stops there too."""
    position: Position | None = None
    """Where reading continues in data whose passes have no known length."""
    stop_is_final: bool = True
    """Whether that stop is for good."""
    stopped_by: str | None = None
    """Why the script ended the loop after this step, if it did: a job that resumes here trains no further."""


class Attached(msgspec.Struct, frozen=True):
    """What travels beside the state: to a worker that joins, and into checkpoints."""

    conditions: Conditions
    progress: TrainingProgress
    began: ModuleModes | None = None
    """Modes at the begin of the loop: they show whether the script was changed since."""
    modes: ModuleModes | None = None
    """Modes now."""


class ExtraState:
    """``get_extra_state`` of one replicated module's parts, by name.

    It is not compared between workers: forward may change it on each of them, as under DDP.
    """

    beside_the_state = True

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def __bool__(self) -> bool:
        """Whether the module has any extra state."""
        return any(True for _ in self._parts())

    def state_dict(self) -> dict[str, Any]:
        return {name: part.get_extra_state() for name, part in self._parts()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        parts = dict(self._parts())
        for name, value in state.items():
            parts[name].set_extra_state(value)

    def _parts(self) -> Iterator[tuple[str, torch.nn.Module]]:
        for name, part in self._module.named_modules():
            if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
                yield name, part


def _optimizers(registered: Mapping[str, Stateful]) -> Iterator[tuple[str, Any]]:
    return ((key, item) for key, item in registered.items() if isinstance(getattr(item, "param_groups", None), list))


def named_parameters(modules: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters of ``modules`` with their names; one that several modules share comes once for each."""
    for key, root in modules.items():
        for name, param in root.named_parameters():
            yield f"{key}.{name}", param


def _modules(modules: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    for key, root in modules.items():
        for name, module in root.named_modules():
            yield f"{key}.{name}", module
