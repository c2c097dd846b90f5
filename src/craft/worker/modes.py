"""What parameters and modules are switched to: trained or frozen (``requires_grad``), ``train()`` or ``eval()``.

No ``state_dict`` has it, and code between the steps may change it. So it travels beside the state, to those who join and into
checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
import torch


class Modes(msgspec.Struct, frozen=True):
    """By name, those that are not as torch makes them."""

    frozen: tuple[str, ...] = ()
    """Parameters that get no gradient."""
    evaluating: tuple[str, ...] = ()
    """Modules that are in ``eval()``."""

    @classmethod
    def of(cls, modules: Mapping[str, torch.nn.Module]) -> Modes:
        """As they are now."""
        return cls(
            frozen=tuple(name for name, param in _parameters(modules) if not param.requires_grad),
            evaluating=tuple(name for name, module in _modules(modules) if not module.training),
        )

    def put(self, modules: Mapping[str, torch.nn.Module]) -> None:
        """Switch ``modules`` to the same."""
        frozen, evaluating = frozenset(self.frozen), frozenset(self.evaluating)
        for name, param in _parameters(modules):
            if param.requires_grad == (name in frozen):
                param.requires_grad_(name not in frozen)
        for name, module in _modules(modules):
            module.training = name not in evaluating


def _parameters(modules: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for key, root in modules.items():
        for name, param in root.named_parameters():
            yield f"{key}.{name}", param


def _modules(modules: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    for key, root in modules.items():
        for name, module in root.named_modules():
            yield f"{key}.{name}", module
