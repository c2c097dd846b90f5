"""One call of ``job.steps`` or ``job.attempts``: the work before, around and after its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from craft.decide.step.settle import IN_UPDATE
from craft.decide.techniques import Stragglers
from craft.decide.techniques.technique import Moment
from craft.protocol.errors import GroupError
from craft.protocol.membership import Settlement
from craft.protocol.values.activity import Phase
from craft.telemetry.fault_points import reach
from craft.worker.checkpoint.lifecycle import CheckpointLifecycle
from craft.worker.loop.inner_loop.hooks import StepHooks, hooks_of, moment_of
from craft.worker.loop.inner_loop.microbatch import CurrentStep, InnerLoop
from craft.worker.loop.joining import Joining
from craft.worker.loop.loop_calls import LoopCalls
from craft.worker.loop.loop_end import LoopEnd, step_at_end
from craft.worker.loop.monitors import LoopMonitors
from craft.worker.loop.pre_loop_calls import PreLoopCalls
from craft.worker.loop.step_exchange import StepExchange
from craft.worker.loop.step_report import StepReport
from craft.worker.loop.step_result import StepResult
from craft.worker.loop.step_runner import StepRunner
from craft.worker.loop.trained_state import TrainedState
from craft.worker.membership.client import Left
from craft.worker.membership.ft_calls import FaultTolerantCalls
from craft.worker.membership.participant import column_of
from craft.worker.membership.participant_links import LoopLinks
from craft.worker.monitor import frozen_parameters
from craft.worker.monitor.repeated_microbatch import PROBE
from craft.worker.recovery.state_transfer import StateTransfer
from craft.worker.recovery.undo import StateCopy
from craft.worker.state.loop_context import LoopContext
from craft.worker.state.preflight import check_conditions, make_equal


class TrainingLoop:
    """Runs one training loop on this worker. Owned by the main thread."""

    def __init__(self, context: LoopContext, passed: PreLoopCalls | None) -> None:
        """``passed`` is set if the job ended this loop before this worker joined; the loop then yields nothing."""
        self.settings = settings = context.settings
        self.participant = participant = context.participant
        self.activity = context.activity
        self.source = context.source
        self.seed = context.seed
        self.lanes = context.lanes
        self.current: CurrentStep | None = None
        """The step that the script is in, or was in last."""
        self.finished = False
        """Whether the driver of the loop has ended it, on every worker after the same step."""
        self.over = False
        """Whether the loop has ended."""
        self.broken_off = False
        """Whether the script left the loop after a committed step; the work at the loop's end is still due."""
        self._passed = passed
        self._expected: tuple[int, tuple[int, ...]] | None = None
        self._membership = context.membership
        self._reporter = reporter = context.reporter
        self._conditions = context.conditions
        self.state = TrainedState(context)
        self._monitors = LoopMonitors(context, self.state, self._in_microbatch)
        self.checks = self._monitors.checks
        self.consistency = consistency = self._monitors.consistency
        self.lifecycle = CheckpointLifecycle(context, consistency.agreement, self.state.leaves)
        own = {**self.lifecycle.hooks, Stragglers.name: self._monitors.speed}
        hooks = hooks_of(context.techniques, own, settings, reporter)
        self.step_hooks = StepHooks(hooks, reporter.note, self._moment)
        self.inner_loop = InnerLoop(self.source, self.seed, self.activity, self.step_hooks, context.split.lane)
        self.transfer = StateTransfer(context, self.lifecycle)
        calls = FaultTolerantCalls(participant, context.donor, settings.state_key_bytes, self._regroup_between_steps)
        self.calls = LoopCalls(self, participant, calls, self.activity)
        self.loop_end = LoopEnd(context, self.state, self.lifecycle, self.calls.call)
        self.step_result = StepResult(self.state.buffers, self.lanes, self.lifecycle.numbers)
        self.undo = StateCopy(self.lifecycle.state, context.modules, context.registered)
        """Copy of the state of the last commit, where the script's update comes before the commit; unused elsewhere."""
        self._report = StepReport(context, self._monitors.speed, self.lifecycle, self.transfer, self.step_hooks)
        self.exchange = StepExchange(context, self.state, consistency.word_part, self._report.word_part)
        self.runner = StepRunner(
            context,
            self.state.buffers,
            self.exchange,
            consistency,
            self.step_result,
            self.settled,
            self.lifecycle.differs,
            self.undo.put_back,
        )
        self.joining = Joining(
            context, self.state, self.transfer, self.lifecycle, consistency, self.exchange, self.runner
        )
        self.link = context.link
        self.split = context.split
        self._links = LoopLinks(
            trainable=self.state.trainable,
            can_serve=self.transfer.can_serve,
            record=lambda entered: self._report.account.entered(replace(entered, leader=self.loop_end.leader)),
        )

    def _in_microbatch(self) -> bool:
        return self.current is not None and self.current.microbatch is not None

    def _moment(self, step: int | None = None, **more: Any) -> Moment:
        return moment_of(self.participant.ledger, self.applied if step is None else step, self.behind, **more)

    @property
    def applied(self) -> int:
        """The step that the script is in; on a joiner that is catching up, behind that of the others."""
        return self.lifecycle.applied

    # Before the first step.

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start the loop; at the end of the block, end it, or leave the job if the block is left in another way."""
        if self._passed is not None:
            self._pass_over(self._passed)
            yield
            return
        try:
            self._start()
            yield
            self.end()
        except Left:
            self.lifecycle.leave()
            raise
        except GeneratorExit:
            # The script left the loop: by ``break``, or by an exception, which shows when the script ends.
            self.broken_off = not self.over and self.current is not None and self.current._done
            raise
        finally:
            if not self.broken_off:
                self.close() if self.over else self._abandon()

    def _pass_over(self, passed: PreLoopCalls) -> None:
        """Skip a loop that the job ended before this worker joined: the script continues after it."""
        self.participant.loop_begun(self._links)
        self.lifecycle.applied = step_at_end(passed, self.participant.loops)
        self.calls.passed = passed
        self.over = True
        self.close()

    def _start(self) -> None:
        """Enter a generation, and ensure that all workers begin from the same state and conditions."""
        participant = self.participant
        participant.loop_begun(self._links)
        if self.link is not None:
            self.link.loop_begun(self._enter_while_waiting)
        self.activity.now(Phase.JOINING, participant.step)
        self._reporter.report(joined=True, loop=participant.loops, after_loop=False)
        # The first generation, or a newer one than the previous loop's.
        must_enter = not participant.ledger.generation or participant.moved
        settlement = self._regroup() if must_enter else None
        # A loss leads to another round, unless a worker got through: then all have, and may be training already.
        while not participant.started:
            try:
                self._compare()
                settlement = participant.start(settlement)
            except GroupError as error:
                participant.broke(error)
                participant.await_move()
                settlement = self._regroup()
        reach("started", participant.step)
        if participant.ledger.has_state:
            self.transfer.needs_nothing()
            self.lifecycle.applied = participant.step
            if settlement is not None:
                self.settled(settlement, level=True)
        else:
            assert settlement is not None
            self.joining.join(settlement)
        self._reporter.report(total_steps=self.source.total_steps)
        self._report.account.begin()

    def _compare(self) -> None:
        self.lifecycle.begin()
        group, members = self.participant.group, self.participant.ledger.members
        check_conditions(group, members, self._conditions, self.participant.start_step)
        self._follow()
        twins, members = column_of(self.participant)
        unequal = make_equal(twins, members, self.state.leaves())
        if unequal is not None:
            self._reporter.unequal(unequal)

    # Around each step.

    def wants_more(self) -> bool:
        """Return whether there is another step, after the work at the boundary before it."""
        if self.over:
            return False
        self.state.reshard()
        self._monitors.parameters.check()
        if self.participant.ledger.over and not self.joining.has_results:
            # Only a worker that joined after the loop's end, or caught up meanwhile, gets here.
            return False
        self.checks.at_boundary(self.applied)
        self.lifecycle.at_boundary(self.behind, lambda: self.settled(self._regroup(), level=True))
        if self._report.ended:
            return False
        self._membership.at(self.applied)
        if self.source.total_steps is not None and self.applied >= self.source.total_steps:
            return False
        if not self.joining.is_behind:
            self.runner.at_boundary()
        return True

    def begin(self) -> None:
        """Begin the inner loop of a step."""
        # The script's code is done: a worker that blocks here, to enter a generation, waits for others.
        self.activity.now(Phase.EXCHANGING, self.applied)
        if not self.exchange.gradients.layout.fits():
            self._lay_out()
        if self.joining.is_behind:
            self.state.buffers.begin()
            return
        self.transfer.give()
        self.runner.begin(self.lifecycle.saved)

    def _lay_out(self) -> None:
        """Exchange other parameters from here on, if every worker's script froze or unfroze the same."""
        gradients = self.state.new_gradients()
        told = frozen_parameters.encode(self.settings.worker_id, gradients.layout.trainable)
        parts = self.calls.call_before_step(frozen_parameters.CALL, told)
        frozen_parameters.compare(parts, self.applied, self.state.modules)
        self.exchange.lay_out(gradients)

    def next_microbatch(self) -> int | None:
        """Return the inner loop's next microbatch; the data source learns what to expect."""
        if self.joining.warms_up():
            return PROBE
        if (result := self.joining.next_result()) is not None:
            self.joining.replay(result)
            return None
        self.activity.now(Phase.EXCHANGING, self.applied)
        if not self.participant.ledger.pending:
            self.step_hooks.reach("before_commit")
        microbatch = self.runner.next_microbatch()
        ledger = self.participant.ledger
        if microbatch is not None and self._expected != (self.participant.step, ledger.owners):
            self._expected = (self.participant.step, ledger.owners)
            self.source.expect(self.participant.step, ledger.share)
        return microbatch

    def conclude(self) -> bool:
        """End the body of a step of ``job.attempts``; return whether it is committed."""
        self.activity.now(Phase.EXCHANGING, self.applied)
        self.step_hooks.reach("before_commit")
        return self.runner.conclude()

    def committed(self, number: int) -> dict[str, float]:
        """Record and report a committed step; return its metrics."""
        outcome = self.step_result.last
        assert outcome is not None and outcome.combined.step == number == self.applied
        return self._report.committed(outcome, self.runner.waited_s)

    # Calls between the steps, and new generations.

    @property
    def behind(self) -> bool:
        """Whether this worker takes no part between steps: it is catching up, or joined after the loop."""
        ledger = self.participant.ledger
        return self.joining.is_behind or self.calls.passed is not None or ledger.worker_id in ledger.idle

    def _regroup(self) -> Settlement:
        settlement = self.participant.regroup(self.source.size_of)
        self._follow()
        return settlement

    def _follow(self) -> None:
        """Take the state of the checkpoint that all workers rolled back to, if they did."""
        if self.lifecycle.follow():
            self._reporter.report(total_steps=self.source.total_steps)
            self.consistency.restart(self.applied)
            self._report.ended = self.lifecycle.stopped_by is not None

    def _regroup_between_steps(self) -> None:
        # The update of the last committed step may be half done: joiners cannot take this state yet.
        self.settled(self._regroup(), level=self.over)

    def _enter_while_waiting(self) -> bool:
        """Enter a newer generation, if there is one, while this worker waits for a twin in its update; return whether not.

        The twin may wait for this worker's claim, before it can commit the step whose update this is.
        """
        if self.joining.is_followed() or not self.participant.moved:
            return True
        # It is in no call yet, and did not pass by those that others may be in.
        self.participant.begin_call(IN_UPDATE)
        self._regroup_between_steps()
        self.participant.begin_call("")
        return False

    def settled(self, settlement: Settlement, level: bool) -> None:
        """Report a settled generation to the lighthouse, to joiners, and to the script's handlers.

        ``level``: whether the state is that of the step that continues; if not, the script's update comes first.
        """
        if self.participant.entered is not None:
            self._report.account.settled(self.participant.entered)
        # Whether this worker was in a step or before its first: from here on all check the same slices.
        self.consistency.restart(settlement.step + 1)
        self.transfer.settled(settlement)
        if settlement.idle:
            self.calls.tell_joiners()
        if not self.over:
            self.step_hooks.reach("generation_change", lost=self.participant.lost)
        if level:
            # After the loop the state is that of the loop's end, or is marked as spoiled.
            if self.loop_end.digest is not None and self.transfer.is_asked:
                self.lifecycle.spoiled = self.state.digest() != self.loop_end.digest
            self.transfer.give()
        self._reporter.entered(settlement, self.participant.ledger.generation, self.participant.lost)

    # After the last step.

    def end(self) -> None:
        """End the loop; return when all workers have ended it and its last checkpoint is written."""
        self.joining.end()
        # First: a worker that joins from here on learns that there are no more steps.
        self.participant.loop_ended()
        if (self.broken_off or self.finished) and not self._report.ended and self.participant.ledger.idle:
            # A joiner waits for a step that does not come, until all workers regroup.
            self.participant.broke(GroupError("the script left its loop before the last step"))
        self.broken_off = False
        self.over = True
        self.transfer.give()
        self.loop_end.meet()
        self._report.account.complete()
        self._reporter.report(after_loop=True, step=self.participant.step)

    def finish_loop(self) -> None:
        """End the loop if the script left it after a committed step: that step was the last."""
        if self.broken_off:
            try:
                self.end()
            finally:
                self.close()

    def finish(self) -> None:
        """End the script here; return when it has ended on every worker that will end it."""
        if self.calls.passed is not None:
            # It took no part in any loop: the script runs fewer of them here than on the others.
            return
        # A worker may join that runs the code after the loop in place of a lost one.
        self.loop_end.finish(lambda: self.settled(self._regroup(), level=True))

    def give_up(self) -> None:
        """Leave the job if an error left the loop between two steps: nothing continues after it."""
        if self.broken_off:
            self.broken_off = False
            self._abandon()

    def _abandon(self) -> None:
        """Leave the job: the loop was left in the middle of a step."""
        self.close()
        self._membership.close()

    def close(self) -> None:
        """Release everything that only the loop needs; collective calls remain possible."""
        self._monitors.close()
        self.step_hooks.close()
        self.lifecycle.close()
        self.exchange.close()
        self.source.close()
        self._report.account.flush()
