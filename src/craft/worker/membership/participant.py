"""This worker's ledger, and its transitions from one generation into the next.

Input: directives, through ``MembershipClient``; the outcome of exchanges. Output: settlements. Only the main thread calls it or,
while a joiner is catching up, the follower's thread instead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence

from msgspec.structs import replace

from craft.decide.detect import stragglers
from craft.decide.detect.stragglers import StragglerSettings
from craft.decide.step import ledger as ledgers
from craft.decide.step import regroup
from craft.decide.step.ledger import Ledger
from craft.decide.step.settle import LossAnswer, settle
from craft.groups.group import Group
from craft.groups.subgroup import SummingSubgroup
from craft.protocol.control_word import Combined
from craft.protocol.errors import ConfigError, GroupError, LeftBehind, StateLost
from craft.protocol.generation_log import Entered, Moments
from craft.protocol.membership import DROPPED, Claim, Generation, Settlement
from craft.telemetry.fault_points import reach
from craft.worker.membership.all_gather import gather
from craft.worker.membership.client import MembershipClient
from craft.worker.membership.generation_entry import GenerationEntry, decode_entry, encode_entry
from craft.worker.membership.participant_links import LoopLinks, ReplicaMember

logger = logging.getLogger(__name__)


class Participant:
    """This worker as a member. The only writer of its ledger: one method for each transition."""

    def __init__(
        self,
        worker_id: str,
        membership: MembershipClient,
        on_loss: LossAnswer,
        on_state_lost: Callable[[int], None],
        straggling: StragglerSettings | None,
        replica: ReplicaMember | None = None,
    ) -> None:
        """``replica``: the replica that this worker is in, if it has several workers.

        ``on_state_lost(generation)`` is called before StateLost is raised, even if that is caught.

        ``straggling``: when a member counts as slow; None: never.
        """
        self._ledger = Ledger(worker_id=worker_id)
        self.generation: Generation | None = None
        self.group: Group | None = None
        self.started = False
        """Whether the members are known to have begun the loop from the same state."""
        self.loops = 0
        """Training loops that the script has begun."""
        self.recalled = False
        """Whether this worker took results of calls before its first loop from members that had made them."""
        self.start_step = 0
        """Step at which the script begins its first training loop."""
        self.lost: tuple[str, ...] = ()
        """Members of the previous generation that are not in this one."""
        self.trained = b""
        """The others' trainable bitmap, after a generation was entered without state."""
        self.entered: Entered | None = None
        """How this worker entered the generation that it acts under."""
        self.together = False
        """Whether the workers of its replica went on as one with the update that they were in, when they entered."""
        self._links = LoopLinks()
        self._membership = membership
        self._on_loss = on_loss
        self._replica = replica
        self._on_state_lost = on_state_lost
        self._straggling = straggling

    @property
    def ledger(self) -> Ledger:
        """This worker's current progress."""
        return self._ledger

    @property
    def step(self) -> int:
        """The step in flight, which is also the number of committed steps."""
        return self.ledger.step

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts of the members, in rank order."""
        return self.generation.hosts if self.generation is not None else ()

    @property
    def slots(self) -> int:
        """Places in the job's layout."""
        return self._membership.slots

    @property
    def moved(self) -> bool:
        """Whether there is a newer generation to enter."""
        return self._membership.newer(self.ledger.generation)

    @property
    def ready(self) -> int:
        """The newest generation that this worker is ready for: no member waits at a step boundary for memory."""
        return self._membership.ready if self._links.can_serve() else self.ledger.generation

    def begin_at(self, step: int) -> None:
        """Set the step of the first training loop: the script has loaded what it trained before."""
        if not self.loops:
            self.start_step = step
        elif step:
            raise ConfigError(
                f"job.steps(start_step={step}): the job has begun already, at step {self.step}; only the first training loop of a"
                " script begins elsewhere"
            )

    def start(self, settlement: Settlement | None) -> Settlement | None:
        """Record that the members begin from the same state and step; return the settlement with that step."""
        self.started = True
        if not self._take_start_step() or settlement is None:
            return settlement
        return replace(settlement, step=self.step)

    def _take_start_step(self) -> bool:
        """Start at the script's first step, unless a checkpoint overrides it or steps were committed."""
        ledger = self.ledger
        if not self.start_step or ledger.loop > 1 or ledger.step or ledger.rewinds:
            return False
        self._ledger = replace(ledger, step=self.start_step)
        return True

    def _started_at(self, claim: Claim) -> Claim:
        """Adjust the claim of a member that was about to take the start step: all were compared, and another began."""
        if claim.started or claim.loop != 1 or claim.rewinds or claim.committed != 0:
            return claim
        return replace(claim, committed=self.start_step)

    def agree(self, combined: Combined) -> bool:
        """Return whether ``combined``, of the step just committed, agrees to enter a prepared generation now."""
        if combined.ready <= self.ledger.generation:
            return False
        self._membership.agree(combined.ready)
        return self.moved

    def check_leaving(self, combined: Combined | None) -> None:
        """Raise Left if ``combined``, of a complete result, agrees to continue without this worker."""
        if combined is not None:
            self._membership.check_leaving(combined.ready)

    def broke(self, error: Exception) -> None:
        """Report that the group of the current generation broke."""
        self._membership.broke(self.ledger.generation, error)

    def await_move(self) -> None:
        """Wait for a newer generation: the group is unusable."""
        self._membership.wait_newer(self.ledger.generation)

    def regroup(self, size_of: Callable[[int], int]) -> Settlement:
        """Enter the newest generation and settle with its members what becomes of the step in flight.

        A failure meanwhile leads to a newer generation, and to another round.
        """
        while True:
            generation, group, moments = self._membership.enter()
            came = time.time()
            reach("entering", self.step)
            if not self.ledger.generation and (restoration := self._membership.restoration) is not None:
                self._ledger = replace(self.ledger, branch=restoration.branch)
            is_first = not self.ledger.generation
            if self._replica is not None:
                self._replica.leave(generation.number)
            self._ledger = regroup.enter(self.ledger, generation)
            if is_first and self.recalled and self.ledger.has_state:
                # The other members of a job that begins anew make these calls again, and would wait for this one.
                raise LeftBehind(
                    "the job began anew after this worker had taken the results of calls from members that are gone: another"
                    " one will come"
                )
            claim = self._claim()
            try:
                parts = gather(group, encode_entry(GenerationEntry(claim, self._links.trainable())))
            except GroupError as error:
                logger.info("generation %d broke while it settled: %s", generation.number, error)
                self._membership.broke(generation.number, error)
                self.await_move()
                continue
            reach("claimed", self.step)
            entries = [decode_entry(part) for part in parts]
            claims = [entry.claim for entry in entries]
            # Whether another loop's conditions were compared does not matter here.
            self.started = any(other.started for other in claims if other.loop == self.ledger.loop)
            if self.started:
                claims = [self._started_at(claim) for claim in claims]
                self._take_start_step()
            try:
                settlement = settle(claims, size_of, self._on_loss, self.ledger.layout)
            except StateLost:
                self._on_state_lost(generation.number)
                raise
            if not self.ledger.has_state and self.ledger.loop < settlement.loop:
                raise LeftBehind(
                    f"the job went on to training loop {settlement.loop} of the script while this worker was joining in loop"
                    f" {self.ledger.loop}: another one will come"
                )
            self._ledger = regroup.settled(self.ledger, settlement)
            self._advanced()
            if not self.ledger.has_state:
                self.trained = next(entry.trainable for entry in entries if entry.claim.committed is not None)
            before = self.generation.worker_ids if self.generation is not None else ()
            self.lost = tuple(worker_id for worker_id in before if worker_id not in generation.worker_ids)
            self.generation, self.group = generation, group
            self._enter_replica(generation, claims, settlement)
            self._membership.settled(generation.number)
            self._write_down(generation, claims, settlement, moments, came)
            return settlement

    def _claim(self) -> Claim:
        claim = replace(regroup.claim(self.ledger), started=self.started)
        return claim if self._replica is None else replace(claim, collectives=self._replica.progress)

    def _enter_replica(self, generation: Generation, claims: Sequence[Claim], settlement: Settlement) -> None:
        if self._replica is not None:
            inner = self._membership.inner_of(generation.number)
            self.together = regroup.updates_together(self.ledger, claims, settlement)
            self._replica.enter(generation, inner, together=self.together)

    def _write_down(
        self, generation: Generation, claims: Sequence[Claim], settlement: Settlement, moments: Moments, came: float
    ) -> None:
        goes_on = [claim for claim in claims if claim.committed == settlement.step]
        self.entered = Entered(
            generation=generation.number,
            time=time.time(),
            told=moments.told,
            aborted=moments.aborted,
            met=moments.met,
            entered=came,
            agreed=moments.aborted is None,
            members=generation.worker_ids,
            lost=self.lost,
            joiners=settlement.joiners,
            idle=settlement.idle,
            step=settlement.step,
            commits=self.ledger.worker_id in settlement.commits,
            retried=any(claim.held or claim.again for claim in goes_on),
            given=settlement.given,
            mine=tuple(each for each in settlement.given if settlement.owners[each] == self.ledger.replica),
            dropped=tuple(index for index, owner in enumerate(settlement.owners) if owner == DROPPED),
            again=tuple(sorted({microbatch for claim in goes_on for microbatch in claim.again})),
        )
        self._links.record(self.entered)

    def loop_begun(self, links: LoopLinks) -> None:
        """Begin a training loop of the script, or skip one that the job has ended."""
        self._links = links
        if self.loops:
            self._ledger = ledgers.loop_begun(self.ledger)
        self.loops += 1
        self.started = False

    def loop_ended(self) -> None:
        """Record that every member has reached the end of the loop."""
        self._ledger = ledgers.loop_ended(self.ledger)

    def begin_step(self, num_microbatches: int) -> None:
        """Plan the step in flight, unless it is planned already."""
        self._ledger = ledgers.begin(self.ledger, num_microbatches)

    def hold(self, microbatch: int) -> None:
        """Record that this worker's buffers hold the gradient of ``microbatch``."""
        self._ledger = ledgers.hold(self.ledger, microbatch)

    def confirm(self) -> None:
        """Record a beat by which all workers of the replica computed their last microbatch whole."""
        self._ledger = ledgers.confirmed(self.ledger)

    def release(self, computed: Collection[int] = ()) -> None:
        """Release what was held of the step in flight, or ``computed``: it is computed again."""
        self._ledger = ledgers.let_go(self.ledger, computed)

    def completed(self) -> None:
        """Record that the whole result of the step in flight is here."""
        self._ledger = ledgers.complete(self.ledger)

    def all_acknowledged(self, combined: Combined) -> None:
        """Commit: every member of the generation has acknowledged the result."""
        self._ledger = ledgers.acknowledged_by_all(self.ledger)
        assert self.ledger.may_commit, self.ledger
        able = [self.ledger.members[rank] for rank in combined.able]
        pace = None
        if self._straggling is not None:
            pace = stragglers.observed(self.ledger.pace, combined.busy_us, self._straggling)
        self._ledger = ledgers.commit(self.ledger, able, pace)
        self._advanced()

    def adopt_state(self) -> None:
        """Adopt a joiner's state; with its queued results it is current."""
        self._ledger = ledgers.adopt(self.ledger)

    def keep_pace(self) -> None:
        """Record that a joiner has caught up and can be given microbatches."""
        self._ledger = ledgers.keeps_pace(self.ledger)

    def begin_call(self, name: str) -> None:
        """Begin a collective call of the script."""
        self._ledger = ledgers.calling(self.ledger, name)

    def receive_call(self) -> None:
        """Record that the parts of all members of that call are here."""
        self._ledger = ledgers.called(self.ledger)

    def return_call(self) -> None:
        """Return that call to the script."""
        self._ledger = ledgers.returned(self.ledger)
        self._advanced()

    def verify_checkpoint(self, branch: int, step: int) -> None:
        """Record that the checkpoint for the rollback is here and verified."""
        self._ledger = ledgers.verified(self.ledger, branch, step)

    def discard_checkpoint(self) -> None:
        """Discard that checkpoint: a member cannot use it, so none does."""
        self._ledger = ledgers.discarded(self.ledger)

    def go_back(self) -> None:
        """Roll back to it: all members have it."""
        self._ledger = ledgers.rewound(self.ledger)

    def _advanced(self) -> None:
        """Publish this worker's progress after a commit, a call, or a settlement."""
        self._membership.progress = (self.ledger.branch, self.ledger.step, self.ledger.calls)


def column_of(participant: Participant) -> tuple[Group | None, tuple[str, ...]]:
    """Return the group of this worker and its twins, which have the same state, and their ids; None if there is no other."""
    ledger, group = participant.ledger, participant.group
    if group is None or not ledger.layout.slots:
        return group, ledger.members
    ranks = ledger.layout.column(ledger.layout.position_of(ledger.rank), len(ledger.members))
    twins = tuple(ledger.members[rank] for rank in ranks)
    return SummingSubgroup(group, ranks, 0) if len(ranks) > 1 else None, twins
