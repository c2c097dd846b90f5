"""What parameters and modules are switched to: trained or frozen (``requires_grad``), ``train()`` or ``eval()``; and which
parameters an optimizer has in its groups.

No ``state_dict`` has it, and code between the steps may change it. So it travels beside the state, to those who join and into
checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch

from craft.snapshots.state.leaves import Stateful


class ModuleModes(msgspec.Struct, frozen=True):
    """By name, those that are not as torch makes them."""

    frozen: tuple[str, ...] = ()
    """Parameters that get no gradient."""
    evaluating: tuple[str, ...] = ()
    """Modules that are in ``eval()``."""
    groups: dict[str, tuple[tuple[str, ...], ...]] = {}
    """By the name of a registered optimizer, the parameters of each of its groups."""

    @classmethod
    def of(cls, modules: Mapping[str, torch.nn.Module], registered: Mapping[str, Stateful]) -> ModuleModes:
        """As they are now."""
        names = {id(param): name for name, param in _parameters(modules)}
        return cls(
            groups={
                key: tuple(tuple(names.get(id(param), "") for param in group["params"]) for group in item.param_groups)
                for key, item in _optimizers(registered)
            },
            frozen=tuple(name for name, param in _parameters(modules) if not param.requires_grad),
            evaluating=tuple(name for name, module in _modules(modules) if not module.training),
        )

    def put(self, modules: Mapping[str, torch.nn.Module], registered: Mapping[str, Stateful]) -> None:
        """Switch ``modules`` to the same, and give optimizers the same groups; before a state is loaded into them."""
        frozen, evaluating = frozenset(self.frozen), frozenset(self.evaluating)
        for name, param in _parameters(modules):
            if param.requires_grad == (name in frozen):
                param.requires_grad_(name not in frozen)
        for name, module in _modules(modules):
            module.training = name not in evaluating
        params = dict(_parameters(modules))
        for key, item in _optimizers(registered):
            wanted = self.groups.get(key, ())
            if all(name in params for group in wanted for name in group):
                del item.param_groups[len(wanted) :]
                for group in wanted[len(item.param_groups) :]:
                    item.add_param_group({"params": [params[name] for name in group]})


def _optimizers(registered: Mapping[str, Stateful]) -> Iterator[tuple[str, Any]]:
    return ((key, item) for key, item in registered.items() if isinstance(getattr(item, "param_groups", None), list))


def _parameters(modules: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for key, root in modules.items():
        for name, param in root.named_parameters():
            yield f"{key}.{name}", param


def _modules(modules: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    for key, root in modules.items():
        for name, module in root.named_modules():
            yield f"{key}.{name}", module
