"""Drive the step in flight: say what to compute next, exchange it, and commit with all workers.

The script's inner loop calls it on the main thread: ``begin``, then ``next_microbatch`` until it reports that the step is
committed, with ``start`` and ``hold`` around each microbatch. The script sees failures only as more microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from craft.decide.step.replicas import able_replicas
from craft.protocol.control_word import Combined, MicrobatchRecord
from craft.protocol.errors import BitsDiffer, GroupError
from craft.protocol.membership import Settlement
from craft.telemetry.fault_points import reach
from craft.worker.loop.safe_points import SafePoints
from craft.worker.loop.step_exchange import StepExchange
from craft.worker.loop.step_result import StepResult
from craft.worker.monitor.consistency import ConsistencyCheck
from craft.worker.monitor.repeated_microbatch import PROBE, is_extra, probes_for
from craft.worker.recovery.follower import CommittedResult
from craft.worker.reduce.buckets import BucketLayout
from craft.worker.reduce.exchange import Attempt
from craft.worker.reduce.module_buffers import ModuleBuffers
from craft.worker.state.loop_context import LoopContext


class StepRunner:
    """Drives the step in flight from its first microbatch to its commit."""

    def __init__(
        self,
        context: LoopContext,
        buffers: ModuleBuffers,
        exchange: StepExchange,
        bits: ConsistencyCheck,
        step_result: StepResult,
        on_settled: Callable[[Settlement, bool], None],
        on_differs: Callable[[BitsDiffer, int], None],
        undo: Callable[[], None],
    ) -> None:
        """``on_settled(settlement, level)``: ``level`` says whether the state here is that of the step that continues.

        ``on_differs(error, step)`` is called when bits differ, before ``error`` is raised. ``undo`` restores the state of the
        last commit, where the script's update comes before the commit.
        """
        self.waited_s = 0.0
        """Time this worker waited for the others' microbatches in the exchange of the last committed step."""
        self._participant = context.participant
        self._modules = tuple(context.modules.values())
        self._exchange = exchange
        self._points = SafePoints(context.participant, exchange, context.link)
        self._gathering = exchange.gathering
        self._buffers = buffers
        self._consistency = bits
        self._step_result = step_result
        self._size_of = context.source.size_of
        self._on_settled = on_settled
        self._on_differs = on_differs
        self._undo = undo
        self._computing: frozenset[str] = frozenset()
        """Members with microbatches in the step in flight."""
        self._counted: frozenset[str] = frozenset()
        """Members with microbatches in the step before it."""

    @property
    def step(self) -> int:
        return self._participant.step

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
        self._gathering.clear()
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
        if self._points.must_regroup_alone():
            self._regroup()
        self.take_up()

    def take_up(self) -> None:
        """Check the state as of the last commit, and take part in the exchange from here on."""
        self._consistency.begin_step(self.step)
        self._participant.begin_step(self._size_of(self.step))
        self._look_at_newcomers()
        self._exchange.open()

    def _look_at_newcomers(self) -> None:
        """Have the whole state compared if a member computes in this step that did not before.

        Before it computes, such a member has compared a microbatch with the others. In steps that gather it compared only its
        rows: there all compute that microbatch in this step. One of a replica could not compute it without the others: there
        its replica and one other do.
        """
        ledger = self._participant.ledger
        able = able_replicas(ledger.layout, ledger.members, ledger.idle)
        self._computing = frozenset(ledger.members[rank] for each in able for rank in ledger.layout.ranks_of(each))
        fresh = self._computing - self._counted if self._counted else frozenset()
        if self._consistency.newcomer:
            fresh |= {ledger.worker_id}
        if fresh:
            sharded = bool(ledger.layout.slots)
            self._consistency.sample_state(
                self._gathering.expected or sharded, not sharded or probes_for(ledger, able, fresh)
            )

    def next_microbatch(self) -> int | None:
        """Return what to compute next (or PROBE), or None once the step is committed. A safe point."""
        step = self.step
        while True:
            if self._points.must_regroup(self._extra):
                self._regroup()
                if self.step > step:
                    return None
                self._exchange.open()
                if self._points.are_shared:
                    continue
            if (extra := self._points.extra(self._extra)) is not None:
                return extra
            ledger = self._participant.ledger
            if self._rows_missing:
                if missing := self._gathering.missing(ledger.pending):
                    return missing[0]
                self._gather()
            elif ledger.pending:
                return ledger.pending[0]
            elif self._exchange_held():
                return None

    @property
    def _rows_missing(self) -> bool:
        """Whether the first pass of a step that gathers is not over."""
        return self._gathering.in_use and not self._gathering.complete

    def _extra(self) -> int | None:
        """Return what to compute now only for comparison; None: nothing."""
        if self._rows_missing:
            return None
        ledger = self._participant.ledger
        return PROBE if self._consistency.probe_due(ledger) else self._consistency.repeats.due(ledger)

    def _gather(self) -> None:
        """Exchange the rows of all microbatches among their owners; after a loss, wait for a generation."""
        try:
            self._gathering.exchange(self._participant.group, self._participant.ledger)
        except GroupError as error:
            self._participant.broke(error)
            self._participant.await_move()

    def start(self, microbatch: int, weight: float) -> None:
        """Begin ``microbatch``: the user's code computes it next."""
        self._gathering.start()
        self._points.computes()
        self._buffers.restore()
        hasher = self._consistency.hasher(microbatch, self._participant.ledger)
        self._exchange.start(microbatch, weight, hashed=hasher is not None)

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
        self._exchange.num_computed += 1
        hasher = self._consistency.hasher(microbatch, self._participant.ledger)
        leaf = None if is_extra(microbatch) else self._exchange.gradients.finish(hasher)
        digest = leaf.digest if leaf is not None else self._exchange.gradients.discard(hasher)
        if not self._points.spoiled:
            self._consistency.found(microbatch, hasher, digest)
        if microbatch == 0 and self._gathering.in_use and self._participant.ledger.idle:
            self._consistency.found_rows(self._gathering.digest_of(0))
        if leaf is None:
            return
        record = MicrobatchRecord(
            microbatch=microbatch,
            weight=leaf.weight,
            present=leaf.present,
            scalars=tuple(sorted(scalars.items())),
            more=more,
            said=tuple(said),
            carried=carried.numel() if carried is not None else 0,
        )
        self._exchange.hold(record, carried, leaf.late)

    def pass_over(self, microbatch: int) -> None:
        """Keep only the rows of a microbatch that gathered before all rows were here."""
        weight = self._exchange.gradients.weight
        self._exchange.gradients.discard(None)
        ledger = self._participant.ledger
        if not is_extra(microbatch):
            self._gathering.keep(microbatch, weight, sorted(ledger.held))
        elif ledger.share and self._consistency.wants(microbatch):
            # Compute it again when all rows are here: only then can its bits be compared.
            self._gathering.in_use = True
        else:
            self._gathering.expected = True
            self._consistency.found_rows(self._gathering.digest_of(microbatch))
            self._consistency.leave_out(microbatch)

    def hold_empty(self, microbatch: int) -> None:
        """Hold a microbatch whose stream has ended, with weight 0."""
        if is_extra(microbatch):
            self._consistency.leave_out(microbatch)
            return
        self._gathering.keep_empty(microbatch)
        leaf = self._exchange.gradients.hold_empty(microbatch, self._size_of(self.step))
        self._exchange.hold(
            MicrobatchRecord(microbatch=microbatch, weight=0.0, present=leaf.present, more=False, data=False)
        )

    # For job.attempts, whose body computes all of its share before any of it is held.

    def computed(self, microbatch: int, weight: float, scalars: dict[str, float]) -> None:
        """Hold ``microbatch`` after an attempt's body: nothing of it is left to exchange."""
        self._exchange.num_computed += 1
        leaf = self._exchange.gradients.hold_empty(microbatch, self._size_of(self.step))
        logged = tuple(sorted(scalars.items()))
        self._exchange.hold(
            MicrobatchRecord(microbatch=microbatch, weight=weight, present=leaf.present, scalars=logged)
        )

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
        self._exchange.clear()
        self._exchange.open()
        return False

    def _exchange_held(self) -> bool:
        """Exchange the held gradients; return True if that committed the step."""
        attempt, participant = self._exchange.finish(), self._participant
        verdict = self._points.may_commit(attempt)
        if verdict is False:
            return False
        assert attempt.combined is not None
        if attempt.combined.resend:
            self._exchange.resend()
            return False
        if not self._compare_bits(attempt.combined):
            participant.await_move()
            return False
        participant.completed()
        idle, live = participant.ledger.idle, participant.ledger.is_live
        participant.all_acknowledged(attempt.combined)
        if participant.ledger.idle != idle:
            # A member is current from here on: all check the same slices of the state from the next step on.
            self._consistency.restart(self.step)
        self._committed(attempt, live=live)
        self.waited_s = self._exchange.waited_s
        return True

    def _regroup(self, at_boundary: int | None = None) -> None:
        """Enter the newest generation; the step in flight is then committed, or continues under a new plan.

        ``at_boundary``: the generation that all enter before any code of the step runs; otherwise that code may have run.
        """
        attempt = self._exchange.leave()
        settlement = self._participant.regroup(self._size_of)
        self._consistency.regrouped()
        self._gathering.regrouped()
        ledger = self._participant.ledger
        commits = ledger.worker_id in settlement.commits
        if commits:
            assert attempt is not None
            self._committed(attempt, live=self._participant.together)
        else:
            self._exchange.hold_only(ledger.held)
            self._points.restore(self._modules)
            # Between two microbatches the buffers belong to neither.
            self._buffers.restore()
            # Before any joiner gets the state.
            self._undo()
            self._exchange.gradients.fetch()
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

    def _committed(self, attempt: Attempt, *, live: bool) -> None:
        """Hand the result to the user's update code and clear the step; ``live``: its replica runs that code together."""
        ledger = self._participant.ledger
        self._points.updates(attempt.step, live=live)
        self._hand_over(attempt, self._exchange.gradients.layout, ledger.generation, ledger.members)
        self._exchange.clear()
        self._gathering.clear()
        self._consistency.committed(attempt.combined, ledger.worker_id in self._computing)
        self._counted = self._computing
        reach("committed", attempt.step)

    def replay(self, result: CommittedResult) -> None:
        """Hand over the result of a step that was committed while this worker was fetching its state."""
        self._consistency.check_replayed(result.combined)
        self._points.updates(result.attempt.step, live=False)
        self._hand_over(result.attempt, result.layout, result.generation, result.members)
        reach("replayed", result.attempt.step)

    def _hand_over(self, attempt: Attempt, layout: BucketLayout, generation: int, members: tuple[str, ...]) -> None:
        self._step_result.give(attempt, layout, generation, members)
        self._exchange.num_computed, self.waited_s = 0, 0.0
