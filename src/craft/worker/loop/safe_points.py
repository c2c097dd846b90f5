"""Safe points: where a worker enters a newer generation, and where it commits.

A worker alone decides at each point whether a generation waits for it. The workers of a replica decide together, by a beat, so
that none of them waits in a collective for another one that has left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from craft.decide.step.beat import BeatMessage, before_commit, before_microbatch
from craft.groups.sharded import fsdp_reset
from craft.protocol.errors import GroupError
from craft.telemetry.fault_points import reach
from craft.worker.loop.step_exchange import StepExchange
from craft.worker.membership.participant import Participant
from craft.worker.reduce.exchange import Attempt
from craft.worker.replica.link import ReplicaLink


class SafePoints:
    """The safe points of one worker's steps. Owned by the main thread."""

    def __init__(self, participant: Participant, exchange: StepExchange, link: ReplicaLink | None) -> None:
        """``link``: to the other workers of the replica; None: it is one worker."""
        self._participant = participant
        self._exchange = exchange
        self._link = link
        self._extra = 0

    @property
    def are_shared(self) -> bool:
        """Whether the workers of a replica decide together here."""
        return self._link is not None and self._participant.ledger.is_live

    @property
    def spoiled(self) -> bool:
        """Whether the microbatch that was computed last has numbers that stand in for those of a lost worker."""
        return self._link is not None and self._link.spoiled

    def must_regroup_alone(self) -> bool:
        """Return whether to enter a newer generation now, before the inner loop.

        Workers of a replica wait for their next beat: each generation has one row of beats, and one worker of a replica may enter
        it here while another is in the middle of the step.
        """
        return not self.are_shared and self._participant.moved

    def must_regroup(self, extra: Callable[[], int | None]) -> bool:
        """Return whether to enter a newer generation now: then there is one. All workers of a replica get the same answer.

        ``extra``: what this worker would compute now only for comparison.
        """
        participant, link = self._participant, self._link
        if link is None or not self.are_shared:
            return participant.moved
        reach("beat", participant.step)
        message = BeatMessage(whole=not link.spoiled and link.whole, waits=participant.moved, extra=extra() or 0)
        answer = link.beat(message, before_microbatch)
        if answer is not None and answer.confirms:
            participant.confirm()
            self._exchange.gradients.confirm()
            if answer.go:
                self._extra = answer.extra
                return False
        participant.await_move()
        return True

    def extra(self, alone: Callable[[], int | None]) -> int | None:
        """Return what to compute now only for comparison: as the last beat said, or ``alone()`` where there is none."""
        return (self._extra or None) if self.are_shared else alone()

    def may_commit(self, attempt: Attempt) -> bool | None:
        """Return whether the step is committed; None: the combined word decides what comes instead.

        False: a newer generation follows.
        """
        participant, link = self._participant, self._link
        error = attempt.error
        if link is None or not participant.ledger.is_live:
            return self._judge(attempt) if error is None else self._broke(attempt, error)
        message = BeatMessage(whole=error is None, may_commit=error is None and attempt.usable)
        answer = link.beat(message, before_commit)
        if answer is not None and answer.go:
            # One worker of the replica has every acknowledgement: then every member has the result.
            return True
        if answer is not None and answer.confirms:
            return None
        return self._broke(attempt, error)

    @staticmethod
    def _judge(attempt: Attempt) -> bool | None:
        return True if attempt.usable else None

    def _broke(self, attempt: Attempt, error: GroupError | None) -> bool:
        if attempt.group is not None and error is not None:
            self._exchange.report(attempt.group.generation, error)
        self._participant.await_move()
        return False

    def computes(self) -> None:
        """Begin a microbatch."""
        if self._link is not None:
            self._link.compute(live=self._participant.ledger.is_live)

    def restore(self, modules: Sequence[torch.nn.Module]) -> None:
        """Bring sharded modules back to where the step began, after a microbatch that broke in the middle."""
        if self._link is not None and self._link.spoiled:
            fsdp_reset.reset(modules)
            self._link.cleaned()

    def updates(self, step: int, *, live: bool) -> None:
        """Begin the update of ``step``; ``live``: the workers of the replica run it together."""
        if self._link is not None:
            ledger = self._participant.ledger
            self._link.update(ledger.branch, step, live=live, keep=bool(ledger.idle))
