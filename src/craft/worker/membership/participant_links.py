"""What a participant is given by the training loop and by the replica of its worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from craft.protocol.generation_log import Entered
from craft.protocol.membership import Generation, GroupProgress
from craft.worker.membership.group_opening import AnyGroup


@dataclass(frozen=True)
class LoopLinks:
    """What the current training loop gives to the participant."""

    trainable: Callable[[], bytes] = bytes
    """Returns the bitmap of this worker's trainable parameters."""
    can_serve: Callable[[], bool] = lambda: True
    """Returns whether this worker has memory for the state that it gives to joiners."""
    record: Callable[[Entered], None] = lambda _: None
    """Records how this worker entered a generation."""


class ReplicaMember(Protocol):
    """A worker's part in its replica."""

    def leave(self, number: int) -> None:
        """End the group of the replica, unless it is that of generation ``number``, which the worker enters.

        Called before it claims anything there.
        """

    def enter(self, generation: Generation, inner: AnyGroup | None, *, together: bool) -> None:
        """Use the group of a generation that is settled; None: the replica is not complete.

        ``together``: its workers go on with the update that they are in as one.
        """

    @property
    def progress(self) -> tuple[GroupProgress, ...] | msgspec.UnsetType:
        """How far the update has come that the worker is in, or ended last; UNSET in an inner loop."""
