"""A small job of sharded replicas: 2 replicas of 2 positions, unless said otherwise.

A microbatch and an update are ``COLLECTIVES`` calls in the groups of the replica, each of which needs all its workers. What is
left out, and why nothing is lost by it:

* What a worker sent inside its replica before it died arrives before it dies or never: that it arrives later looks the same.
* A directive that arrives while a worker computes changes nothing until the next beat, so it is heard there.
* In a replica that cannot lose a worker any more (``is_steady``) all positions move together. That one of them is late
  looks, to the others, like its messages taking their time, and they may.
* Data never runs out, and all weights are 1.

In an update a worker whose replica is not whole takes the outputs of collectives from a twin that recorded them.
"""

from __future__ import annotations

from typing import Literal

from craft.decide.job.state import JobState
from craft.decide.step.beat import BeatAnswer, BeatMessage
from craft.protocol.control_word import Word
from craft.protocol.membership import Member, Slot

from ..world import Bounds, Share, Worker, World

COLLECTIVES = 2
"""In each microbatch and update: the first in one group of the replica, the second in another one."""
UPDATE = -1
"""In the place of a microbatch: the update after a commit."""

Phase = Literal["out", "adopt", "ready", "beat", "work", "exchange", "commit beat", "wait"]
"""
* ``out``: in no settled generation, or in a replica that does not compute, which takes part in the exchange only
* ``adopt``: waits for the state from a twin
* ``ready``: came to a beat before a microbatch, the exchange or the end
* ``beat``, ``commit beat``: told position 0, and waits for the answer
* ``work``: computes a microbatch or runs the update
* ``exchange``: sent its share, and waits for the result and the acknowledgements
* ``wait``: is to regroup: waits for a newer generation
"""


class ShardedBounds(Bounds, frozen=True, kw_only=True):
    workers: int = 4
    replica_size: int = 2
    steps: int = 2
    microbatches: int = 2
    newcomers: tuple[int, ...] = ()
    """Positions of workers that come at any time, as spares or in the place of lost ones."""
    victims: str = "abcdefgh"
    """Workers that may be lost. By symmetry, one replica's are enough."""
    replica_breaks: int = 0
    """Collectives of a replica that break in one worker though all its workers live."""
    breakable: str = "ab"
    """Workers in which they may break. By symmetry, one replica's are enough."""
    resends: int = 0
    """Gradients that change after they were sent."""
    chained: bool = False
    """Whether a group has two neighbouring positions each, not all; and a worker may notice a break only at the end."""
    one_after_the_other: bool = False
    """Whether a worker is lost, and a newcomer comes, only after a collective broke in an update."""
    may_lose_state: bool = False
    """Whether so much goes wrong that no state may be left at some position."""
    from_the_first_step: bool = False
    """Whether the search begins where all have settled the first generation, and not where it is made."""
    lockstep: bool = True
    """Whether positions move together in a replica that cannot lose a worker any more."""

    @property
    def names(self) -> str:
        return "abcdefgh"[: self.workers + len(self.newcomers)]

    def slot(self, name: str) -> Slot:
        """Where a worker begins; a newcomer's replica is a guess."""
        number = self.names.index(name)
        if number < self.workers:
            return Slot(number // self.replica_size, number % self.replica_size)
        return Slot(0, self.newcomers[number - self.workers])

    def member(self, name: str) -> Member:
        return Member(worker_id=name, slot=self.slot(name))

    def new_job(self) -> JobState:
        return JobState(slots=self.workers, replica_size=self.replica_size)

    def may_crash(self, world: World, name: str) -> bool:
        return name in self.victims and self.may_join(world)

    def may_join(self, world: World) -> bool:
        still_to_break = isinstance(world, ShardedWorld) and world.replica_breaks > 0
        return not (self.one_after_the_other and still_to_break)

    def can_go_on(self, world: World) -> bool:
        """Whether a running member at every position has the state; not checked where it may be of different steps."""
        if self.may_lose_state:
            return False
        members = world.job.members
        found = {
            self.slot(each.name).position
            for each in world.having("running")
            if each.name in members and each.ledger.has_state
        }
        return len(found) == self.replica_size


class ShardedWorker(Worker, frozen=True, kw_only=True):
    """A worker with what its replica makes of it."""

    phase: Phase = "out"
    beats: int = 0
    """Beats of this generation whose answer it took."""
    message: BeatMessage | None = None
    """What it told position 0."""
    answer: tuple[int, int, BeatAnswer] | None = None
    """Position 0's last answer: (generation, beat, answer)."""
    activity: int = UPDATE
    """The microbatch that it computes, or the update."""
    progress: int = 0
    """Collectives of it that it came out of."""
    since: int = 0
    """How many of these it came out of under older generations: the others of its replica cannot make them with it now."""
    broken: bool = False
    """Whether it ended the groups of its replica."""
    updating: bool = False
    """Whether it has committed a step whose update is not at its end."""
    alone: bool = False
    """Whether it runs that update without its replica."""
    records: frozenset[tuple[int, int]] = frozenset()
    """(step, collective) of the outputs that it recorded."""
    due: bool = False
    """Whether all agreed to enter the upcoming generation at this boundary."""
    attempt: int = 0
    """How often the gradients of this step were sent before."""
    tainted: int = -1
    """In truth: the collective that broke here; what it sends in later ones is wrong. It notices at the end at the latest."""
    dirty: bool = False
    """In truth: what it computes now is wrong."""
    spoiled: bool = False
    """In truth: its state is wrong."""
    added: tuple[int, ...] = ()
    """In truth: the microbatches in the sum that it holds, each as often as it was added."""

    @property
    def waits_for_twins(self) -> bool:
        """Whether it runs an update with the outputs of its twins."""
        return self.updating and (self.alone or self.broken)

    @property
    def is_leader(self) -> bool:
        return self.ledger.mates[0] == self.name


class ShardShare(Share, frozen=True):
    """A member's share: its word for all, and its sum for its twins."""

    word: Word = Word(step=0)
    added: tuple[int, ...] = ()
    mates: tuple[str, ...] = ()
    attempt: int = 0


class ShardedWorld(World, frozen=True, kw_only=True):
    chained: bool = False
    """Whether the collectives of a replica are in two groups that share a worker."""
    replica_breaks: int = 0
    resends: int = 0


def position_of(worker: Worker) -> int:
    return worker.ledger.layout.position_of(worker.ledger.rank)
