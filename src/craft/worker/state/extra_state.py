"""What a module's ``state_dict`` has besides parameters and buffers: what its parts give by ``get_extra_state``.

It follows the job as what is registered does, to those who join and into checkpoints. It is not compared: forward may have
changed it, which is then each worker's own matter, as it is under DDP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


class ExtraState:
    """That of one replicated module, by the names of its parts."""

    beside_the_state = True

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def __bool__(self) -> bool:
        """Whether there is any."""
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
