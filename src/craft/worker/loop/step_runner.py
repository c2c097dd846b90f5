"""The step in flight: compute microbatches, hold and exchange gradients, commit with all workers.

The script's inner loop drives it on the main thread: ``begin``, then ``next_microbatch`` until it reports that the step is
committed, with ``start`` and ``hold`` around each microbatch. The script sees failures only as more microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from time import monotonic

import torch

from craft.protocol.control_word import Combined, MicrobatchRecord, Word
from craft.protocol.errors import BitsDiffer, GroupError
from craft.protocol.membership import Settlement
from craft.telemetry.fault_points import reach
from craft.worker.loop.batch_gather import BatchGather
from craft.worker.loop.step_result import StepResult
from craft.worker.membership.participant import Participant
from craft.worker.monitor.consistency import ConsistencyCheck
from craft.worker.monitor.repeated_microbatch import PROBE, is_extra
from craft.worker.recovery.follower import CommittedResult
from craft.worker.reduce import trainable_mask
from craft.worker.reduce.accumulator import Flats, GradientAccumulator
from craft.worker.reduce.buckets import BucketLayout
from craft.worker.reduce.exchange import Attempt, ExchangeThread
from craft.worker.reduce.module_buffers import ModuleBuffers
from craft.worker.reduce.routes.choice import route_of
from craft.worker.reduce.routes.flat import FlatRoute
from craft.worker.reduce.word_parts import LoopPart
from craft.worker.report.reporter import Reporter


class StepRunner:
    """Drives the step in flight from its first microbatch to its commit."""

    def __init__(
        self,
        participant: Participant,
        exchange: ExchangeThread,
        gradients: GradientAccumulator,
        buffers: ModuleBuffers,
        bits: ConsistencyCheck,
        step_result: StepResult,
        size_of: Callable[[int], int],
        on_settled: Callable[[Settlement, bool], None],
        reporter: Reporter,
        loop_part: Callable[[int], LoopPart],
        gathering: BatchGather,
        on_differs: Callable[[BitsDiffer, int], None],
        undo: Callable[[], None],
    ) -> None:
        """``on_settled(settlement, level)``: ``level`` says whether the state here is that of the step that continues.

        ``on_differs(error, step)`` is called when bits differ, before ``error`` is raised. ``undo`` restores the state of the
        last commit, where the script's update comes before the commit.
        """
        self.gradients = gradients
        self.num_computed = 0
        """Microbatches that the script computed here since the last commit."""
        self.waited_s = 0.0
        """Time this worker waited for the others' microbatches in the exchange of the last committed step."""
        self._participant = participant
        self._exchange = exchange
        self._buffers = buffers
        self._consistency = bits
        self._step_result = step_result
        self._size_of = size_of
        self._on_settled = on_settled
        self._reporter = reporter
        self._loop_part = loop_part
        """Gives what else goes into the word of a step."""
        self.gathering = gathering
        self._on_differs = on_differs
        self._undo = undo
        self._computing: frozenset[str] = frozenset()
        """Members with microbatches in the step in flight."""
        self._counted: frozenset[str] = frozenset()
        """Members with microbatches in the step before it."""
        self._records: dict[int, MicrobatchRecord] = {}
        self._carried: dict[int, torch.Tensor] = {}
        """Values that microbatches held here leave for the next step."""
        self._attempt: Attempt | None = None
        self._route: FlatRoute | None = None
        self._result: Flats | None = None
        self._late = False
        self._overlaps = False
        """Whether the current microbatch is exchanged bucket by bucket during its backward."""
        self._wait_for_all = False
        """Whether nothing of this step is exchanged before all of it is computed."""

    @property
    def step(self) -> int:
        return self._participant.step

    def lay_out(self, gradients: GradientAccumulator) -> None:
        """Exchange other parameters from here on: code between the steps froze or unfroze some."""
        self.gradients.detach()
        self.gradients = gradients
        self._route, self._result = None, None

    def at_boundary(self) -> None:
        """Enter the generation agreed on with the last step, if any, before code of the next step runs.

        Its joiners take the state of this moment, and run all code of that step themselves.
        """
        last = self._step_result.last
        if last is not None and self._participant.agree(last.combined):
            self._buffers.begin()
            # If it broke meanwhile, others may be in the step already: then all give the state of the inner loop's beginning.
            self._regroup(at_boundary=last.combined.ready)

    def begin(self, saved: bool = False) -> None:
        """Begin a step's inner loop; enter a newer generation first, if there is one.

        ``saved``: a checkpoint was taken at the boundary before it.
        """
        self._buffers.begin()
        self.gathering.clear()
        self.keep_pace()
        if saved:
            self._consistency.hash_whole_state()

    def keep_pace(self) -> None:
        """Do the work of a step boundary, and take part in the step that begins."""
        last = self._step_result.last
        if last is None or not self._participant.agree(last.combined):
            # First: this worker's share is assigned to it and must not count as lost. Unless all workers enter a prepared
            # generation here: then the step is planned anew, and no share is assigned.
            self._participant.begin_step(self._size_of(self.step))
        if self._participant.moved:
            self._regroup()
        self.take_up()

    def take_up(self) -> None:
        """Check the state as of the last commit, and take part in the exchange from here on."""
        self._consistency.begin_step(self.step)
        self._participant.begin_step(self._size_of(self.step))
        self._look_at_newcomers()
        self._start_attempt()

    def _look_at_newcomers(self) -> None:
        """Have the whole state compared if a member computes in this step that did not before.

        Before it computes, such a member has compared a microbatch with the others. In steps that gather it compared only its
        rows: there all compute that microbatch in this step.
        """
        ledger = self._participant.ledger
        self._computing = frozenset(ledger.members) - ledger.idle
        if self._consistency.newcomer or (self._counted and not self._computing <= self._counted):
            self._consistency.sample_state(self.gathering.expected)

    def next_microbatch(self) -> int | None:
        """Return what to compute next (or PROBE), or None once the step is committed. A safe point."""
        step = self.step
        while True:
            if self._participant.moved:
                self._regroup()
                if self.step > step:
                    return None
                self._start_attempt()
            ledger, waits = self._participant.ledger, self.gathering.in_use and not self.gathering.complete
            if not waits and self._consistency.probe_due(ledger):
                return PROBE
            repeat = None if waits else self._consistency.repeats.due(ledger)
            if repeat is not None:
                return repeat
            if waits:
                if missing := self.gathering.missing(ledger.pending):
                    return missing[0]
                self._gather()
            elif ledger.pending:
                return ledger.pending[0]
            elif self._exchange_held():
                return None

    def _gather(self) -> None:
        """Exchange the rows of all microbatches among their owners; after a loss, wait for a generation."""
        try:
            self.gathering.exchange(self._participant.group, self._participant.ledger)
        except GroupError as error:
            self._participant.broke(error)
            self._participant.await_move()

    def start(self, microbatch: int, weight: float) -> None:
        """Begin ``microbatch``: the user's code computes it next."""
        self.gathering.start()
        if self.gathering.in_use and not self.gathering.complete:
            # Its gradient is discarded: it has no place in the tree.
            self._buffers.restore()
            self.gradients.start(0, 1, None)
            self.gradients.weigh(weight)
            return
        last = self._participant.ledger.pending == (microbatch,)
        # The result must not overwrite a gradient that is still to be hashed.
        hashed = self.gradients.in_place and self._consistency.hasher(microbatch, self._participant.ledger) is not None
        # If a microbatch is computed once more after the last one, no exchange may run meanwhile.
        self._overlaps = last and not (self._wait_for_all or hashed)
        lent = self._result if self.gradients.in_place and (last or is_extra(microbatch)) else None
        self._buffers.restore()
        if is_extra(microbatch):
            self.gradients.start(0, 1, None, lent)
        else:
            flushed = self._overlap if self._overlaps else None
            self.gradients.start(microbatch, self._size_of(self.step), flushed, lent)
        self.gradients.weigh(weight)

    def _overlap(self, bucket: int) -> None:
        """Start exchanging a bucket that is ready during backward; the last one is left to the main thread."""
        if self.gathering.in_first_pass:
            return
        reach("flushed", self.step)
        if self._attempt is not None and bucket < len(self.gradients.layout.buckets) - 1:
            assert self._route is not None
            self._route.flushed(bucket)
            self._exchange.give(self._attempt, bucket)

    def hold(
        self,
        microbatch: int,
        scalars: dict[str, float],
        more: bool,
        said: Sequence[str] = (),
        carried: torch.Tensor | None = None,
    ) -> None:
        """Hold the gradient of ``microbatch`` until the step is committed.

        ``carried``: the values that it leaves for the same microbatch of the next step.
        """
        self.num_computed += 1
        hasher = self._consistency.hasher(microbatch, self._participant.ledger)
        leaf = None if is_extra(microbatch) else self.gradients.finish(hasher)
        digest = leaf.digest if leaf is not None else self.gradients.discard(hasher)
        self._consistency.found(microbatch, hasher, digest)
        if microbatch == 0 and self.gathering.in_use and self._participant.ledger.idle:
            self._consistency.found_rows(self.gathering.digest_of(0))
        if leaf is None:
            return
        if carried is not None:
            self._carried[microbatch] = carried
        self._keep(
            MicrobatchRecord(
                microbatch=microbatch,
                weight=leaf.weight,
                present=leaf.present,
                scalars=tuple(sorted(scalars.items())),
                more=more,
                said=tuple(said),
                carried=carried.numel() if carried is not None else 0,
            )
        )
        self._late = self._late or (leaf.late and self._overlaps)

    def pass_over(self, microbatch: int) -> None:
        """Keep only the rows of a microbatch that gathered before all rows were here."""
        weight = self.gradients.weight
        self.gradients.discard(None)
        ledger = self._participant.ledger
        if not is_extra(microbatch):
            self.gathering.keep(microbatch, weight, sorted(ledger.held))
        elif ledger.share and self._consistency.wants(microbatch):
            # Compute it again when all rows are here: only then can its bits be compared.
            self.gathering.in_use = True
        else:
            self.gathering.expected = True
            self._consistency.found_rows(self.gathering.digest_of(microbatch))
            self._consistency.leave_out(microbatch)

    def hold_empty(self, microbatch: int) -> None:
        """Hold a microbatch whose stream has ended, with weight 0."""
        if is_extra(microbatch):
            self._consistency.leave_out(microbatch)
            return
        self.gathering.keep_empty(microbatch)
        leaf = self.gradients.hold_empty(microbatch, self._size_of(self.step))
        self._keep(MicrobatchRecord(microbatch=microbatch, weight=0.0, present=leaf.present, more=False, data=False))

    # For job.attempts, whose body computes all of its share before any of it is held.

    def computed(self, microbatch: int, weight: float, scalars: dict[str, float]) -> None:
        """Hold ``microbatch`` after an attempt's body: nothing of it is left to exchange."""
        self.num_computed += 1
        leaf = self.gradients.hold_empty(microbatch, self._size_of(self.step))
        logged = tuple(sorted(scalars.items()))
        self._keep(MicrobatchRecord(microbatch=microbatch, weight=weight, present=leaf.present, scalars=logged))

    def conclude(self) -> bool:
        """Commit the step with all workers; return False if it must be computed again, from the state before it."""
        return (not self._participant.moved and self._exchange_held()) or self.interrupt()

    def interrupt(self, computed: Collection[int] = ()) -> bool:
        """Enter a newer generation; return True if the step is committed from data at hand, False if it is undone.

        ``computed``: microbatches that an interrupted body had computed here.
        """
        step = self.step
        # Before the settlement: nothing of an undone step is reusable, so its cost is all of it.
        self._participant.release(computed)
        self._regroup()
        if self.step > step:
            return True
        self.gradients.clear()
        self._records.clear()
        self._start_attempt()
        return False

    def _keep(self, record: MicrobatchRecord) -> None:
        self._records[record.microbatch] = record
        if record.microbatch == 0:
            self._buffers.keep_first()
        self._participant.hold(record.microbatch)

    def _start_attempt(self) -> None:
        """Prepare the exchange of the step in flight, under the current plan."""
        ledger, layout = self._participant.ledger, self.gradients.layout
        if self._route is not None and self._route.group is not self._participant.group:
            # A generation was entered between the steps. The old group may still write into its receive buffers.
            self._route, self._result = None, None
        if self._route is None or self._route.owners != ledger.owners:
            participant = self._participant
            self._route = route_of(participant.group, participant.hosts, layout, ledger.owners)
        if self._result is None:
            self._result = Flats(layout)
        attempt = Attempt(
            self.step,
            self._participant.group,
            self._route,
            self.gradients,
            self._result,
            self._buffers.empty_like,
            self._participant.generation,
            ledger.plan,
        )
        attempt.tell(lambda: trainable_mask.tell(self._participant.group, ledger, layout))
        self._attempt = attempt

    def _exchange_held(self) -> bool:
        """Exchange the held gradients; return True if that committed the step."""
        attempt, route = self._attempt, self._route
        assert attempt is not None and route is not None
        began = monotonic()
        self._exchange.wait()
        # The exchange thread waited while this one computed: only waits from here on delay this worker.
        route.waited_s = monotonic() - began
        if attempt.finish(lambda: self._word(attempt)):
            assert attempt.combined is not None
            if attempt.combined.resend:
                self._resend()
                return False
            if not self._compare_bits(attempt.combined):
                self._participant.await_move()
                return False
            self._participant.completed()
            idle = self._participant.ledger.idle
            self._participant.all_acknowledged(attempt.combined)
            if self._participant.ledger.idle != idle:
                # A member is current from here on: all check the same slices of the state from the next step on.
                self._consistency.restart(self.step)
            self._committed(attempt)
            self.waited_s = route.waited_s
            return True
        if attempt.group is not None and attempt.error is not None:
            self._reporter.broke(attempt.group.generation, attempt.error)
        self._participant.await_move()
        return False

    def _resend(self) -> None:
        """Exchange again: a worker's gradient came after its bucket was sent."""
        if self.gradients.in_place:
            self._let_go()
        self._late = False
        self._start_attempt()

    def _let_go(self) -> None:
        """Drop gradients that were sent and are not held unchanged: they are computed again."""
        self._participant.release()
        self.gradients.drop()
        self._records.clear()
        self._carried.clear()
        self._result = None
        # A late gradient cannot be late again if nothing is sent early.
        self._wait_for_all, self._late = self._wait_for_all or self._late, False

    def _word(self, attempt: Attempt) -> Word:
        held = sorted(self._participant.ledger.held)
        changed = self._buffers.changed if 0 in held else ()
        if changed:
            attempt.buffers = self._buffers.pack()
        if self._carried:
            rows = [self._carried[microbatch] for microbatch in held if microbatch in self._carried]
            if rows:
                attempt.carried[self._participant.ledger.rank] = torch.cat(rows)
        bits, loop = self._consistency.word_part(), self._loop_part(self.step)
        return Word(
            step=self.step,
            records=tuple(self._records[microbatch] for microbatch in held),
            ready=self._participant.ready,
            able=self._participant.ledger.can_compute,
            stop=loop.stop,
            resend=self._late,
            buffers=changed,
            rewinds=self._participant.ledger.rewinds,
            touched=self._buffers.touched,
            digest=bits.digest,
            probe=bits.probe,
            sample=bits.sample,
            state=bits.state,
            whole=bits.whole,
            newcomer=bits.newcomer,
            agreed=bits.agreed,
            computed=bits.computed,
            repeated=bits.repeated,
            busy_us=loop.busy_us,
            save=loop.checkpoint.save,
            wish=loop.checkpoint.wish,
            busy=loop.checkpoint.busy,
            saved=loop.checkpoint.saved,
            leave=loop.checkpoint.leave,
        )

    def _regroup(self, at_boundary: int | None = None) -> None:
        """Enter the newest generation; the step in flight is then committed, or continues under a new plan.

        ``at_boundary``: the generation that all enter before any code of the step runs; otherwise that code may have run.
        """
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            # The old group is aborted already, so this returns at once.
            self._exchange.wait()
            if attempt.usable:
                self._participant.check_leaving(attempt.combined)
                self._participant.completed()
            if attempt.begun and (self.gradients.lets_go or (self.gradients.in_place and self._late)):
                self._let_go()
        # The old group may still write into its receive buffers.
        self._route, self._result = None, None
        settlement = self._participant.regroup(self._size_of)
        self._consistency.regrouped()
        self.gathering.regrouped()
        commits = self._participant.ledger.worker_id in settlement.commits
        if commits:
            assert attempt is not None
            self._committed(attempt)
        else:
            # Between two microbatches the buffers belong to neither.
            self._buffers.restore()
            # Before any joiner gets the state.
            self._undo()
            self.gradients.fetch()
            self._look_at_newcomers()
        level = not commits and at_boundary in (None, self._participant.ledger.generation)
        self._on_settled(settlement, level)

    def _compare_bits(self, combined: Combined) -> bool:
        """Return whether the step counts; False: newcomers with another state leave, and it is repeated."""
        try:
            return self._consistency.check(combined, self._participant.ledger, self._buffers.name_of)
        except BitsDiffer as error:
            self._on_differs(error, combined.step)
            raise

    def _committed(self, attempt: Attempt) -> None:
        """Hand the result to the user's update code and clear the step."""
        ledger = self._participant.ledger
        self._hand_over(attempt, self.gradients.layout, ledger.generation, ledger.members)
        self.gradients.clear()
        self._records.clear()
        self._carried.clear()
        self.gathering.clear()
        self._attempt = None
        self._late = self._wait_for_all = False
        self._consistency.committed(attempt.combined, ledger.worker_id in self._computing)
        self._counted = self._computing
        reach("committed", attempt.step)

    def replay(self, result: CommittedResult) -> None:
        """Hand over the result of a step that was committed while this worker was fetching its state."""
        self._consistency.check_replayed(result.combined)
        self._hand_over(result.attempt, result.layout, result.generation, result.members)
        reach("replayed", result.attempt.step)

    def _hand_over(self, attempt: Attempt, layout: BucketLayout, generation: int, members: tuple[str, ...]) -> None:
        self._step_result.give(attempt, layout, generation, members)
        self.num_computed, self.waited_s = 0, 0.0
