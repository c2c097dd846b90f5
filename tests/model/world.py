"""The state of a small job: workers, what they sent each other, and the lighthouse. All of it frozen and hashable.

What is left out, and why nothing is lost by it:

* Blocks, buffers and words travel as one ``Share``: a member sends it once it holds all its microbatches, and whoever has
  the shares of all members has the whole result.
* What was sent may arrive at any later time, also after its sender died or left. That some of it never arrives needs no
  transition of its own: nobody is obliged to take it, and a newer generation is always on offer.
* The lighthouse hears of a death at once (unless ``Bounds.late_news``): that it hears later looks, to the workers, like a
  directive that takes its time, and directives may.
* A worker ends only when every member of its generation has committed every step: whoever joins at the very end has no
  other donor. A joiner's state comes at once and in one piece; that it computes a microbatch to warm up is left out.
* At least one of the first workers is never lost, since a job whose state is lost everywhere cannot go on. Unless others
  are started in their place (``Bounds.fresh``): then all may be lost, and the job begins again, from a checkpoint of its
  beginning.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec.structs import replace

from craft.control.core.persistence import Durable
from craft.decide.job.state import JobState
from craft.decide.step.ledger import Ledger
from craft.decide.step.settle import LossAnswer
from craft.protocol.membership import Claim, Generation, Member
from craft.protocol.messages import Restoration

Status = Literal["running", "cut", "dead", "left", "finished"]
"""``cut``: declared lost, hears nothing from the lighthouse any more, and still runs. ``left``: went as it was told."""


class Violation(Exception):
    """A promise does not hold in some reachable state."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """How large the world is, and what may go wrong in it."""

    workers: int = 3
    joiners: int = 0
    fresh: int = 0
    """Workers that come at any time after the first generation was made, in the place of lost ones; then all may be lost."""
    steps: int = 3
    microbatches: int = 3
    on_loss: LossAnswer = "redo"
    crashes: int = 0
    cuts: int = 0
    """Living workers that are declared lost."""
    suspicions: int = 0
    """Living workers that are suspected, by their agent or by others: declared lost unless only they have the state."""
    breaks: int = 0
    """Exchanges that break though nobody is lost."""
    drains: int = 0
    """Workers that are told to leave at a step boundary."""
    restarts: int = 0
    """Restarts of the lighthouse."""
    back_after: int | None = None
    """After this step of the first branch all go back to the beginning, as if numbers were not finite."""
    late_news: bool = False
    """Whether the lighthouse may hear of a death at any later time, and be told of a broken exchange before."""
    slow: str | None = None
    """A worker on which a microbatch takes ten times as long as on the others: the plan changes after one step."""

    def __post_init__(self) -> None:
        if self.crashes + self.cuts + self.drains >= self.workers and not self.fresh:
            raise ValueError("somebody who has the state must be left")

    def size_of(self, step: int) -> int:
        return self.microbatches if step < self.steps else 0

    def member(self, name: str) -> Member:
        """A worker as it reports itself when it joins."""
        return Member(worker_id=name)

    def new_job(self) -> JobState:
        """What a lighthouse knows before any worker has joined."""
        return JobState(slots=self.workers)

    def may_crash(self, world: World, name: str) -> bool:
        return True

    def may_join(self, world: World) -> bool:
        return True

    def can_go_on(self, world: World) -> bool:
        """Whether the members that run have the training state."""
        members = world.job.members
        return any(each.name in members and each.ledger.committed is not None for each in world.having("running"))


class Share(msgspec.Struct, frozen=True):
    """A member's whole contribution to a step: the sums of what it holds, and its word."""

    sender: str
    generation: int
    step: int
    ready: int
    owners: tuple[int, ...]
    able: bool = True
    branch: int = 0
    busy_us: int = 0


class Ack(msgspec.Struct, frozen=True):
    """Its sender has the whole result of the step."""

    sender: str
    generation: int
    step: int
    branch: int = 0


class Verified(msgspec.Struct, frozen=True):
    """Its sender has read and verified the checkpoint that all are about to go back to."""

    sender: str
    generation: int


class Claimed(msgspec.Struct, frozen=True):
    """A member's claim, sent to all members of a generation."""

    sender: str
    generation: Generation
    claim: Claim


Message = Share | Ack | Verified | Claimed

TARGET = (1, 0)
"""(branch, step) that all go back to."""


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    ledger: Ledger
    status: Status = "running"
    generation: Generation | None = None
    """The newest one it entered."""
    prepared: Generation | None = None
    """The upcoming generation whose group it opens in the background."""
    outside: bool = False
    """Whether the generation that goes on meanwhile is one without it: then no word tells it when to enter."""
    hand: frozenset[int] | None = None
    """The microbatches that make up the result it has in hand."""
    agreed: int = 0
    """The generation that all were ready for, according to the combined word of the result in hand."""
    able: frozenset[str] = frozenset()
    """Who is able, according to that word."""
    busy_us: tuple[int, ...] = ()
    """How long a microbatch took on each rank, according to that word."""
    stateless: bool = False
    """Whether the members of its generation found that none of them has the state."""
    knows: bool = False
    """Whether it has seen that all are to go back: in the result of the step after which they do."""
    unreported: tuple[int, ...] = ()
    """Generations it entered that the lighthouse may still hear of."""
    restoration: int = 0
    """The newest of the job's beginnings that it knew of when it entered its first generation."""

    @property
    def name(self) -> str:
        return self.ledger.worker_id

    @property
    def number(self) -> int:
        return 0 if self.generation is None else self.generation.number

    @property
    def gone_without(self) -> bool:
        """Whether it has the result of a step after which all others go on without it."""
        return self.prepared is not None and self.agreed == self.prepared.number and leaves(self, self.prepared)

    @property
    def acts(self) -> bool:
        """Whether it takes part in the exchange of the generation in its ledger."""
        return self.status in ("running", "cut") and self.ledger.settled

    @property
    def claims(self) -> bool:
        """Whether it waits for the claims of the generation it entered."""
        settled = self.ledger.settled and self.ledger.generation == self.number
        return self.status in ("running", "cut") and self.generation is not None and not settled


class Target(msgspec.Struct, frozen=True):
    """What a directive says."""

    generation: Generation | None
    upcoming: Generation | None
    restoration: Restoration | None = None


class World(msgspec.Struct, frozen=True, kw_only=True):
    workers: tuple[Worker, ...]
    job: JobState
    durable: Durable | None = None
    wire: frozenset[Message] = frozenset()
    targets: tuple[Target, ...] = ()
    """Directives that are still on their way to somebody; the last one is current."""
    history: frozenset[tuple[tuple[int, int], frozenset[int]]] = frozenset()
    """For each (branch, step) that anybody ever committed: the microbatches in it."""
    lighthouses: int = 1
    """How many there have been so far."""
    highest: int = 0
    """The highest generation number that any of them gave out."""
    crashes: int = 0
    cuts: int = 0
    suspicions: int = 0
    breaks: int = 0
    drains: int = 0
    restarts: int = 0
    """How many faults of each kind may still happen."""

    def worker(self, name: str) -> Worker:
        return next(worker for worker in self.workers if worker.name == name)

    def having(self, *statuses: Status) -> Iterable[Worker]:
        return (worker for worker in self.workers if worker.status in statuses)

    def claims(self, number: int) -> dict[str, Claim]:
        return {
            message.sender: message.claim
            for message in self.wire
            if isinstance(message, Claimed) and message.generation.number == number
        }

    def shares(self, ledger: Ledger) -> dict[str, Share]:
        """Those of the step in flight."""
        wanted = (ledger.generation, ledger.branch, ledger.step)
        return {
            message.sender: message
            for message in self.wire
            if isinstance(message, Share) and (message.generation, message.branch, message.step) == wanted
        }

    def verified(self, number: int) -> frozenset[str]:
        return frozenset(each.sender for each in self.wire if isinstance(each, Verified) and each.generation == number)

    def with_worker(self, changed: Worker, *sent: Message) -> World:
        workers = tuple(changed if worker.name == changed.name else worker for worker in self.workers)
        return replace(self, workers=workers, wire=self.wire | frozenset(sent) if sent else self.wire)


def pruned(world: World, bounds: Bounds) -> World:
    """Forget what can no longer matter to anybody, so that worlds that behave alike are equal."""
    workers = tuple(_forgotten(world, worker, bounds) for worker in world.workers)
    if workers != world.workers:
        world = replace(world, workers=workers)
    acting = [
        (worker.ledger.generation, (worker.ledger.branch, worker.ledger.step))
        for worker in world.workers
        if worker.acts
    ]
    claiming = {worker.number for worker in world.workers if worker.claims}

    def matters(message: Message) -> bool:
        if isinstance(message, Claimed):
            generation = message.generation
            return generation.number in claiming or any(
                worker.number < generation.number and generation.rank_of(worker.name) is not None
                for worker in world.having("running")
            )
        if isinstance(message, Verified):
            return any(generation == message.generation and place < TARGET for generation, place in acting)
        place = (message.branch, message.step)
        return any(generation == message.generation and level <= place for generation, level in acting)

    wire = frozenset(message for message in world.wire if matters(message))
    older, current = world.targets[:-1], world.targets[-1:]
    targets = tuple(target for target in older if _is_wanted(world, target)) + current
    return replace(world, wire=wire, targets=targets)


def _forgotten(world: World, worker: Worker, bounds: Bounds) -> Worker:
    if worker.status == "cut" and _is_harmless(world, worker):
        worker = replace(worker, status="dead")
    if worker.status in ("dead", "left", "finished"):
        done = worker.status == "finished"
        ledger = Ledger(worker_id=worker.name, step=worker.ledger.step if done else 0, has_state=done)
        return Worker(ledger=ledger, status=worker.status)
    if worker.status == "cut" and worker.unreported:
        return replace(worker, unreported=())
    if len(worker.unreported) > 1 and not bounds.late_news:
        return replace(worker, unreported=worker.unreported[-1:])
    return worker


def _is_harmless(world: World, worker: Worker) -> bool:
    """Whether a worker that is cut off can neither come by another result nor be of use to anybody."""
    generation, ledger = worker.generation, worker.ledger
    if generation is None:
        return True
    others = frozenset(generation.worker_ids) - {worker.name}
    if any(other.name in others and other.number <= generation.number for other in world.having("running", "cut")):
        return False
    if not ledger.settled:
        return not others <= world.claims(generation.number).keys()
    return ledger.result is None and not others <= world.shares(ledger).keys()


def _is_wanted(world: World, target: Target) -> bool:
    """Whether an older directive could still make a difference to somebody."""
    generation, upcoming = target.generation, target.upcoming
    if generation is not None and any(is_news(worker, generation) for worker in world.having("running")):
        return True
    return upcoming is not None and all(
        is_news(worker, upcoming) and worker.status == "running" and worker.prepared != upcoming
        for worker in world.workers
        if upcoming.rank_of(worker.name) is not None
    )


def goes_back(worker: Worker, bounds: Bounds) -> bool:
    """Whether it stands at the boundary at which all go back, and knows that."""
    place = (worker.ledger.branch, worker.ledger.step)
    return bounds.back_after is not None and place == (0, bounds.back_after + 1) and worker.knows


def leaves(worker: Worker, generation: Generation) -> bool:
    """Whether the worker is a member now and not in ``generation``, which follows: it is to leave."""
    inside = worker.generation is not None and worker.generation.rank_of(worker.name) is not None
    return inside and generation.number > worker.number and generation.rank_of(worker.name) is None


def is_news(worker: Worker, generation: Generation) -> bool:
    """Whether the worker can still enter this generation; one that is not newer than its own is ignored."""
    return generation.number > worker.number and generation.rank_of(worker.name) is not None
