"""Build attempts at exchanging the step in flight, and keep their route as long as the group and the plan last."""

from __future__ import annotations

from collections.abc import Callable

import torch

from craft.worker.membership.participant import Participant
from craft.worker.reduce.accumulator import GradientAccumulator
from craft.worker.reduce.exchange import Attempt
from craft.worker.reduce.flats import Flats
from craft.worker.reduce.routes.choice import route_of
from craft.worker.reduce.routes.flat import FlatRoute


class AttemptBuilder:
    """Owned by the thread that takes part in the exchange: the main thread, or the follower's."""

    def __init__(self, participant: Participant, buffers_like: Callable[[tuple[int, ...]], torch.Tensor]) -> None:
        """``buffers_like`` allocates memory for the module buffers with these numbers."""
        self._participant = participant
        self._buffers_like = buffers_like
        self._route: FlatRoute | None = None
        self._owners: tuple[int, ...] = ()
        """Those of the route's plan."""

    @property
    def route(self) -> FlatRoute:
        """The route of the last attempt."""
        assert self._route is not None
        return self._route

    @property
    def group_changed(self) -> bool:
        """Whether the last attempt used another group, which may still write into its receive buffers."""
        return self._route is not None and self._route.group is not self._participant.group

    def drop_route(self) -> None:
        """Make another route for the next attempt: the layout or the generation changes."""
        self._route = None

    def build(self, gradients: GradientAccumulator, result: Flats) -> Attempt:
        """Return an attempt at the step in flight, under the current plan."""
        participant, ledger = self._participant, self._participant.ledger
        if self._route is None or self.group_changed or self._owners != ledger.owners:
            self._owners = ledger.owners
            self._route = route_of(participant.group, participant.hosts, gradients.layout, ledger.owners, ledger.layout)
        return Attempt(
            participant.step,
            participant.group,
            self._route,
            gradients,
            result,
            self._buffers_like,
            participant.generation,
            ledger.plan,
        )
