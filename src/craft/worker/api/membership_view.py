"""This worker's place among the members of its job, as a script sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craft.settings.worker import WorkerSettings
from craft.worker.membership.client import MembershipClient
from craft.worker.membership.participant import Participant

if TYPE_CHECKING:
    from craft.worker.loop.training_loop import TrainingLoop


class MembershipView:
    """Ranks and numbers of workers and replicas, which change with the generation."""

    def __init__(self, settings: WorkerSettings, membership: MembershipClient, participant: Participant) -> None:
        self._settings = settings
        self._membership = membership
        self._participant = participant
        self._training: TrainingLoop | None = None
        """The loop that the script is in, or was in last."""

    @property
    def worker_id(self) -> str:
        """This worker's name, constant for its lifetime."""
        return self._settings.worker_id

    @property
    def _members(self) -> tuple[str, ...]:
        return self._participant.ledger.members or self._membership.members

    @property
    def _company(self) -> tuple[int, int] | None:
        if self._training is None:
            return None
        current = self._training.current
        in_body = current._company if current is not None else None
        return in_body or self._training.loop_end.rank_and_size

    @property
    def rank(self) -> int:
        """This worker's rank in the current generation, which may change with the generation; -1 without a slot.

        In the body of an attempt: its position among the participants.
        """
        if (company := self._company) is not None:
            return company[0]
        return self._members.index(self.worker_id) if self.worker_id in self._members else -1

    @property
    def world_size(self) -> int:
        """Number of members of the current generation; in the body of an attempt, of its participants."""
        if (company := self._company) is not None:
            return company[1]
        if self._training is not None and self._training.exchange.gradients.before_backward:
            self._training.checks.world_size_read()
        return len(self._members)

    @property
    def local_rank(self) -> int:
        """This worker's number on its host."""
        return self._settings.local_rank

    @property
    def rank_in_replica(self) -> int:
        """This worker's position in its replica, constant for its lifetime; 0 where a replica is one worker."""
        return self._settings.position

    @property
    def replica_size(self) -> int:
        """Number of workers that hold one copy of the model together."""
        return self._settings.replica_size

    @property
    def replica_rank(self) -> int:
        """This worker's replica; where a replica is one worker, the same as ``rank``. -1 without a slot."""
        ledger = self._participant.ledger
        if self.replica_size == 1:
            return self.rank
        return ledger.replica if ledger.members else -1

    @property
    def num_replicas(self) -> int:
        """Number of complete replicas; where a replica is one worker, the same as ``world_size``."""
        if self.replica_size == 1:
            return self.world_size
        ledger = self._participant.ledger
        return len(ledger.layout.complete(len(ledger.members)))

    @property
    def is_leader(self) -> bool:
        """True on one worker of the generation: rank 0; in a sharded job, position 0 of the first complete replica."""
        if self.replica_size == 1:
            return self.rank == 0
        layout, members = self._participant.ledger.layout, self._participant.ledger.members
        if not members:
            # Before the first generation is entered; its members are complete replicas in the order of their names.
            return self.rank == 0
        complete = layout.complete(len(members))
        return bool(complete) and members[layout.ranks_of(complete[0])[0]] == self.worker_id
