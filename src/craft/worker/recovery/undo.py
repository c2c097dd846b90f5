"""A copy of the training state as of the last commit, to undo a step.

The body of ``job.attempts`` updates the state before the step is committed. ``Attempts`` takes the copy before each step, and
``StepRunner`` restores it if the step is not committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from craft.snapshots.state.device_copy import hold_back
from craft.snapshots.state.leaves import Stateful
from craft.snapshots.state.serialized import Header, State, load
from craft.worker.state.metadata import ModuleModes


class StateCopy:
    """The copy of the state, and its restoration. Owned by the main thread."""

    def __init__(
        self, state: Callable[[], State], modules: Mapping[str, torch.nn.Module], registered: Mapping[str, Stateful]
    ) -> None:
        """``state`` returns the current state."""
        self._state = state
        self._modules = modules
        self._registered = registered
        self._header: Header | None = None
        self._copies: list[torch.Tensor] = []
        self._modes = ModuleModes()
        """Modes that the body may have switched: frozen parameters, ``eval()``, optimizer groups."""
        self._changed = False

    @torch.no_grad()
    def take(self) -> None:
        """Copy the state of the last commit, before the script changes it."""
        if self._changed:
            return
        # A transfer to a joiner or a checkpoint may still read it.
        hold_back()
        state = self._state()
        if self._header is not None and self._header.entries == state.header.entries:
            # Reuse the same memory: the first touch of memory costs more than the copy.
            torch._foreach_copy_(self._copies, state.tensors)
        else:
            self._copies = [tensor.clone() for tensor in state.tensors]
        self._header = state.header
        self._modes = ModuleModes.of(self._modules, self._registered)
        self._changed = True

    def put_back(self) -> None:
        """Restore the state of the last commit after a step that was not committed."""
        if not self._changed:
            return
        self._load()
        self._changed = False

    def put_back_again(self) -> None:
        """Undo what the script changed after a failed attempt, before the next one."""
        assert not self._changed
        self._load()

    def _load(self) -> None:
        assert self._header is not None
        self._modes.put(self._modules, self._registered)
        # Copies of the copies: the script may keep what is loaded, and the next attempt may fail, too.
        load(self._header, [copy.clone() for copy in self._copies], self._modules, self._registered)

    def let_go(self) -> None:
        """Mark the step as committed: the copy is no longer needed."""
        self._changed = False
