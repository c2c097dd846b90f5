"""A copy of the whole training state as of the last commit, for a step that may have to be taken back.

A loop of the script's own makes its updates before the step is committed. ``Attempts`` takes the copy before each step, and
``Flight`` has it put back where the step did not come about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from craft.snapshots.state.device_copy import hold_back
from craft.snapshots.state.leaves import Stateful
from craft.snapshots.state.serialized import Header, State, load
from craft.worker.state.metadata import ModuleModes


class StateCopy:
    """Owned by the main thread."""

    def __init__(
        self,
        state: Callable[[], State],
        modules: Mapping[str, torch.nn.Module],
        registered: Mapping[str, Stateful],
    ) -> None:
        """``state`` gives the state as it is now."""
        self._state = state
        self._modules = modules
        self._registered = registered
        self._header: Header | None = None
        self._copies: list[torch.Tensor] = []
        self._modes = ModuleModes()
        """What the body may have switched: frozen parameters, ``eval()``, groups of optimizers."""
        self._changed = False

    @torch.no_grad()
    def take(self) -> None:
        """Copy the state, which is that of the last commit; from here on the script changes it."""
        if self._changed:
            return
        # What a joiner or a checkpoint is given of it may still be on its way.
        hold_back()
        state = self._state()
        if self._header is not None and self._header.entries == state.header.entries:
            # Into the same memory: the first touch of memory costs more than the copy.
            torch._foreach_copy_(self._copies, state.tensors)
        else:
            self._copies = [tensor.clone() for tensor in state.tensors]
        self._header = state.header
        self._modes = ModuleModes.of(self._modules, self._registered)
        self._changed = True

    def put_back(self) -> None:
        """The step did not come about: the state is that of the last commit again."""
        if not self._changed:
            return
        self._load()
        self._changed = False

    def put_back_again(self) -> None:
        """The next try begins: undo what the script did after the one that did not come about."""
        assert not self._changed
        self._load()

    def _load(self) -> None:
        assert self._header is not None
        self._modes.put(self._modules, self._registered)
        # Copies of the copies: what is loaded may become the script's own, and the next attempt may fail, too.
        load(self._header, [copy.clone() for copy in self._copies], self._modules, self._registered)

    def let_go(self) -> None:
        """The step is committed."""
        self._changed = False
