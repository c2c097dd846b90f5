"""Check that replicated modules still have the parameters that the loop began with.

Others would be neither exchanged nor sent to joiners. torch calls a hook for every parameter or module that is registered
anywhere, so that a step without one costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from craft.protocol.errors import ConfigError
from craft.worker.state.metadata import named_parameters


class ParameterSet:
    """The parameters of one loop's modules. The main thread calls ``check``; the hooks run on any thread."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._modules = modules
        # Without names: pruning and parametrizations change them.
        self._params = frozenset(param for _, param in named_parameters(modules))
        self._stale = False
        self._hooks = [
            register_module_parameter_registration_hook(self._on_registration),
            register_module_module_registration_hook(self._on_registration),
        ]

    def _on_registration(self, module: torch.nn.Module, name: str, registered: Any) -> None:
        self._stale = True

    def check(self) -> None:
        """Raise ConfigError if a parameter was added since the loop began."""
        if not self._stale:
            return
        self._stale = False
        for name, param in named_parameters(self._modules):
            if param not in self._params:
                raise ConfigError(
                    f"the parameter {name} was put there after the loop began: it would not be the same on every worker."
                    " Build the whole model before job.replicate; in the loop change values in place, under torch.no_grad()"
                )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
