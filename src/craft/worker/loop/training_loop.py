"""One call of ``job.steps`` or ``job.attempts``: the loop's parts, and the work around each step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace

from craft.decide.techniques import GpuHealth, Stragglers
from craft.decide.techniques.technique import Chosen, Moment
from craft.protocol.errors import ConfigError, GroupError
from craft.protocol.events import StopRequested
from craft.protocol.membership import Settlement
from craft.protocol.values.activity import Phase
from craft.snapshots.state.device_copy import hold_back
from craft.snapshots.state.leaves import STATE_IS_BUILT, Leaf, digest, module_leaves, registered_leaves
from craft.telemetry.fault_points import reach
from craft.worker.checkpoint.lifecycle import CheckpointLifecycle
from craft.worker.checks.script import ScriptChecks
from craft.worker.loop.batch_gather import BatchGather
from craft.worker.loop.hooks import InWorker, StepHooks, hooks_of
from craft.worker.loop.loop_calls import CurrentStep, LoopCalls
from craft.worker.loop.loop_end import LoopEnd, step_at_end
from craft.worker.loop.microbatch import InnerLoop
from craft.worker.loop.pre_loop_calls import PreLoopCalls
from craft.worker.loop.step_exchange import StepExchange
from craft.worker.loop.step_result import StepResult
from craft.worker.loop.step_runner import StepRunner
from craft.worker.membership.client import Left
from craft.worker.membership.ft_calls import FaultTolerantCalls
from craft.worker.membership.participant import LoopLinks
from craft.worker.monitor import frozen_parameters
from craft.worker.monitor.consistency import ConsistencyCheck
from craft.worker.monitor.gpu import GpuWatch, watch_gpu
from craft.worker.monitor.parameter_set import ParameterSet
from craft.worker.monitor.repeated_microbatch import PROBE
from craft.worker.monitor.stragglers import SpeedTracker
from craft.worker.recovery.catch_up import CatchUp
from craft.worker.recovery.state_transfer import StateTransfer
from craft.worker.recovery.undo import StateCopy
from craft.worker.reduce.accumulator import GradientAccumulator
from craft.worker.reduce.buckets import BucketLayout, bitmap, parameters_of, trainable_of
from craft.worker.reduce.exchange import ExchangeThread
from craft.worker.reduce.module_buffers import ModuleBuffers
from craft.worker.reduce.word_parts import LoopPart
from craft.worker.report.step_log import Committed, StepAccount
from craft.worker.state.loop_context import LoopContext
from craft.worker.state.preflight import check_conditions, make_equal

if TYPE_CHECKING:
    from craft.worker.recovery.follower import CommittedResult

logger = logging.getLogger(__name__)


class TrainingLoop:
    """Runs one training loop on this worker. Owned by the main thread."""

    def __init__(self, parts: LoopContext, passed: PreLoopCalls | None) -> None:
        """``passed`` is set if the job ended this loop before this worker joined; the loop then yields nothing."""
        settings, participant, reporter, techniques = (
            parts.settings,
            parts.participant,
            parts.reporter,
            parts.techniques,
        )
        self.settings = settings
        self.participant = participant
        self.activity = parts.activity
        self.source = parts.source
        self.seed = parts.seed
        self.current: CurrentStep | None = None
        """The step that the script is in, or was in last."""
        self.finished = False
        """Whether the driver of the loop has ended it, on every worker after the same step."""
        self._membership = parts.membership
        self._reporter = reporter
        self.modules = parts.modules
        self._registered = parts.registered
        self._conditions = parts.conditions
        self._own_loop = parts.own_loop
        self.lanes = parts.lanes
        exchanges = not (parts.own_loop or parts.whole)
        exchanged = list(parts.modules.values()) if exchanges else []
        self._parameter_set = ParameterSet(parts.modules if exchanges else {})
        self.checks = ScriptChecks(
            parts.modules,
            parts.registered,
            not exchanges,
            self._in_microbatch,
            reporter.note,
            settings.check_script,
            is_heard=reporter.is_heard,
        )
        self._params = parameters_of(exchanged)
        self._buffers = ModuleBuffers(exchanged, list(parts.modules))
        self._exchange_thread = ExchangeThread(reporter.broke)
        self.checks_bits = settings.check_bits
        self._consistency = ConsistencyCheck(
            settings.check_bits and exchanges,
            settings.digest_bytes,
            self.leaves,
            self.checks.warn,
            self._may_vary,
        )
        self._account = StepAccount(
            settings.run_dir, settings.worker_id, reporter.note, parts.source.samples, reporter.unwritten
        )
        self.lifecycle = CheckpointLifecycle(parts, self._consistency.agreement, self.leaves)
        self._speed = SpeedTracker(techniques, parts.activity, lambda: participant.ledger, reporter.note, reporter.emit)
        own = {**self.lifecycle.hooks, Stragglers.name: self._speed}
        self._gpu = self._watch_gpu(techniques)
        self.step_hooks = StepHooks(hooks_of(techniques, own, settings, reporter), reporter.note, self._moment)
        self.inner_loop = InnerLoop(parts.source, parts.seed, parts.activity, self.step_hooks)
        key = settings.state_key_bytes
        self.transfer = StateTransfer(
            parts.donor, key, participant, parts.modules, parts.registered, self.lifecycle, parts.reserve
        )
        calls = FaultTolerantCalls(participant, parts.donor, key, self._regroup_between_steps)
        self.calls = LoopCalls(self, participant, calls, parts.activity)
        self._passed = passed
        self._catch_up: CatchUp | None = None
        self._expected: tuple[int, tuple[int, ...]] | None = None
        self._ended = False
        self.over = False
        """Whether the loop has ended."""
        self.broken_off = False
        """Whether the script left the loop after a committed step; the work at the loop's end is still due."""
        self.loop_end = LoopEnd(settings.worker_id, participant, self.lifecycle, self.calls.call)
        self._links = LoopLinks(
            trainable=lambda: bitmap(trainable_of(self._params)),
            can_serve=self.transfer.can_serve,
            record=lambda entered: self._account.entered(replace(entered, leader=self.loop_end.leader)),
        )
        self.step_result = StepResult(self._buffers, self.lanes, self.lifecycle.numbers)
        self.undo = StateCopy(self.lifecycle.state, parts.modules, parts.registered)
        """Copy of the state of the last commit, where the script's update comes before the commit; unused elsewhere."""
        self.exchange = StepExchange(
            participant,
            self._exchange_thread,
            self._new_gradients(),
            self._buffers,
            BatchGather(parts.device, parts.source.samples, drops=parts.drops),
            parts.source.size_of,
            self._consistency.word_part,
            self._word_part,
        )
        self.runner = StepRunner(
            participant,
            self.exchange,
            self._buffers,
            self._consistency,
            self.step_result,
            parts.source.size_of,
            self.settled,
            reporter,
            self.lifecycle.differs,
            self.undo.put_back,
        )

    def _in_microbatch(self) -> bool:
        return self.current is not None and self.current.microbatch is not None

    def _may_vary(self) -> bool:
        """Return whether a microbatch may vary on this worker while no other worker could differ from it."""
        on_device = any(param.is_cuda for param in self._params)
        return on_device and len(self.participant.ledger.members) == 1 and not self._conditions.deterministic

    def _new_gradients(self) -> GradientAccumulator:
        return GradientAccumulator(BucketLayout(self._params, self.bucket_bytes), hold=self.settings.hold)

    def _word_part(self, step: int) -> LoopPart:
        """What else goes into the word of ``step``."""
        return LoopPart(
            stop=self.lifecycle.stop_reason or self._membership.winding_down,
            stop_is_final=self.lifecycle.stop_reason is not None,
            busy_us=self._speed.busy_us(self.runner.num_computed),
            checkpoint=self.lifecycle.word_part(step),
        )

    @property
    def applied(self) -> int:
        """The step that the script is in; on a joiner that is catching up, behind that of the others."""
        return self.lifecycle.applied

    @property
    def total_steps(self) -> int | None:
        return self.source.total_steps

    @property
    def bucket_bytes(self) -> int:
        return int(self.settings.bucket_mb * (1 << 20))

    def _moment(self, step: int | None = None, **more: Any) -> Moment:
        ledger = self.participant.ledger
        return Moment(
            step=self.applied if step is None else step,
            branch=ledger.branch,
            generation=ledger.generation or 0,
            members=ledger.members,
            behind=self.behind,
            **more,
        )

    def leaves(self) -> list[Leaf]:
        """Return the whole training state."""
        return [*module_leaves(self.modules), *registered_leaves(self._registered)]

    def buffers_now(self) -> ModuleBuffers:
        """Return the current buffers of all modules, including registered ones."""
        items = (*self.modules.values(), *self._registered.values())
        return ModuleBuffers([each for each in items if isinstance(each, torch.nn.Module)])

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start the loop; at the end of the block, end it, or leave the job if the block is left in another way."""
        if self._passed is not None:
            self.pass_over(self._passed)
            yield
            return
        try:
            self.start()
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
                self.close() if self.over else self.abandon()

    def start(self) -> None:
        """Enter a generation, and ensure that all workers begin from the same state and conditions."""
        self.participant.loop_begun(self._links)
        self.activity.now(Phase.JOINING, self.participant.step)
        self._reporter.report(joined=True, loop=self.participant.loops, after_loop=False)
        settlement = self._regroup() if self._must_meet else None
        # A loss leads to another round, unless a worker got through: then all have, and may be training already.
        while not self.participant.started:
            try:
                self._compare()
                settlement = self.participant.start(settlement)
            except GroupError as error:
                self.participant.broke(error)
                self.participant.await_move()
                settlement = self._regroup()
        reach("started", self.participant.step)
        if self.participant.ledger.has_state:
            self.transfer.needs_nothing()
            self.lifecycle.applied = self.participant.step
            if settlement is not None:
                self.settled(settlement, level=True)
        else:
            assert settlement is not None
            self._join(settlement)
        self._reporter.report(total_steps=self.total_steps)
        self._account.begin()

    @property
    def _must_meet(self) -> bool:
        """Whether a generation must be entered first: the first one, or a newer one than the previous loop's."""
        return not self.participant.ledger.generation or self.participant.moved

    def _regroup(self) -> Settlement:
        settlement = self.participant.regroup(self.source.size_of)
        self._follow()
        return settlement

    def _follow(self) -> None:
        if self.lifecycle.follow():
            self._reporter.report(total_steps=self.total_steps)
            self._consistency.restart(self.applied)
            self._ended = self.lifecycle.stopped_by is not None

    def _compare(self) -> None:
        self.lifecycle.begin()
        group, members = self.participant.group, self.participant.ledger.members
        check_conditions(group, members, self._conditions, self.participant.start_step)
        self._follow()
        unequal = make_equal(group, members, self.leaves())
        if unequal is not None:
            self._reporter.unequal(unequal)

    def _join(self, settlement: Settlement) -> None:
        """Join a running job: take its state and start catching up."""
        self._reporter.report(urgent=False, behind=True)
        self._catch_up = CatchUp(
            self.participant,
            self.transfer,
            self._reporter,
            self._params,
            self._buffers,
            self.source.size_of,
            self.bucket_bytes,
            self._own_loop,
        )
        self.lifecycle.applied, progress = self._catch_up.take_state(settlement)
        if not self.exchange.gradients.layout.fits():
            # The state shows which parameters the others train.
            self.exchange.lay_out(self._new_gradients())
        self.transfer.measure()
        self.lifecycle.take(progress)
        self._consistency.joins()

    @property
    def _has_results(self) -> bool:
        """Whether steps of the others are still to be replayed."""
        return self._catch_up is not None and self._catch_up.has_results

    def wants_more(self) -> bool:
        """Return whether there is another step, after the work at the boundary before it."""
        if self.over:
            return False
        self._parameter_set.check()
        if self.participant.ledger.over and not self._has_results:
            # Only a worker that joined after the loop's end, or caught up meanwhile, gets here.
            return False
        self.checks.at_boundary(self.applied)
        self.lifecycle.at_boundary(self.behind, lambda: self.settled(self._regroup(), level=True))
        if self._ended:
            return False
        self._membership.at(self.applied)
        if self.total_steps is not None and self.applied >= self.total_steps:
            return False
        if self._catch_up is None:
            self.runner.at_boundary()
        return True

    def begin(self) -> None:
        """Begin the inner loop of a step."""
        # The script's code is done: a worker that blocks here, to enter a generation, waits for others.
        self.activity.now(Phase.EXCHANGING, self.applied)
        if not self.exchange.gradients.layout.fits():
            self._lay_out()
        if self._catch_up is not None:
            self._buffers.begin()
            return
        self.transfer.give()
        self.runner.begin(self.lifecycle.saved)

    def _lay_out(self) -> None:
        """Exchange other parameters from here on, if every worker's script froze or unfroze the same."""
        gradients = self._new_gradients()
        told = frozen_parameters.encode(self.settings.worker_id, gradients.layout.trainable)
        parts = self.calls.call_before_step(frozen_parameters.CALL, told)
        frozen_parameters.compare(parts, self.applied, self.modules)
        self.exchange.lay_out(gradients)

    def next_microbatch(self) -> int | None:
        """Return the inner loop's next microbatch; the data source learns what to expect."""
        if self._catch_up is not None:
            if self._catch_up.warms_up():
                return PROBE
            if self._catch_up.catches_up and self._replay(self._catch_up):
                return None
            self._keep_pace()
        self.activity.now(Phase.EXCHANGING, self.applied)
        if not self.participant.ledger.pending:
            self.step_hooks.reach("before_commit")
        microbatch = self.runner.next_microbatch()
        ledger = self.participant.ledger
        if microbatch is not None and self._expected != (self.participant.step, ledger.owners):
            self._expected = (self.participant.step, ledger.owners)
            self.source.expect(self.participant.step, ledger.share)
        return microbatch

    def take_up(self) -> CommittedResult | None:
        """Begin a step of ``job.attempts``; return the result to replay, or None to take part."""
        if self._catch_up is not None:
            self.activity.now(Phase.EXCHANGING, self.applied)
            if self._catch_up.catches_up and (result := self._catch_up.next()) is not None:
                return result
            self._keep_pace()
        return None

    def conclude(self) -> bool:
        """End the body of such a step; return whether it is committed."""
        self.activity.now(Phase.EXCHANGING, self.applied)
        self.step_hooks.reach("before_commit")
        return self.runner.conclude()

    def _replay(self, joining: CatchUp) -> bool:
        """Hand the next queued result to the script; return False after the last."""
        self.activity.now(Phase.EXCHANGING, self.applied)
        result = joining.next()
        if result is not None:
            self.replay(result)
        return result is not None

    def replay(self, result: CommittedResult) -> None:
        """Hand the script the result of a step that was committed without it."""
        self.runner.replay(result)
        if result.able:
            # It tells all workers that this one has caught up, and they include it from the next step on.
            self._caught_up(self.applied + 1)

    def _keep_pace(self) -> None:
        """Take part in this step after catching up; its control word tells the others."""
        self._caught_up(self.applied)
        # If no current member is left, joiners wait for this state. Warming up has changed the buffers.
        self._buffers.restore()
        self.transfer.give()
        # The last replayed step may have agreed on a generation to enter at this boundary.
        self.runner.keep_pace()

    def _caught_up(self, step: int) -> None:
        """Take part in the exchange from ``step`` on."""
        self._catch_up = None
        self._consistency.newcomer = True
        self._reporter.report(urgent=False, behind=False)
        self.participant.keep_pace()
        self._consistency.restart(self.applied + 1)
        logger.info("keeps pace with the others from step %d on", step)

    def committed(self, number: int) -> dict[str, float]:
        """Record and report a committed step; return its metrics."""
        outcome, ledger = self.step_result.last, self.participant.ledger
        assert outcome is not None and outcome.combined.step == number == self.applied
        combined = outcome.combined
        if combined.empty:
            raise ConfigError(
                f"no stream has data from step {number} on: there is nothing left to train on"
                if number
                else "the stream ended before it gave any data: there is nothing to train on"
            )
        # The script's update comes next, while a joiner or a checkpoint may still read the state before it.
        hold_back()
        metrics = dict(combined.metrics)
        self.lifecycle.compare(number, metrics)
        self._account.committed(
            Committed(
                step=number,
                branch=ledger.branch,
                generation=outcome.generation,
                members=outcome.members,
                plan=outcome.plan,
                metrics=metrics,
            )
        )
        self.activity.committed()
        self.activity.now(Phase.UPDATING, number)
        self.transfer.committed(computed=ledger.worker_id in outcome.plan)
        if number == STATE_IS_BUILT and self._reporter.is_heard:
            self._reporter.report(urgent=False, carried_bytes=self.transfer.measure())
        self._ended = combined.ended or combined.stop is not None
        self.lifecycle.applied = number + 1
        self.step_hooks.reach("after_commit", step=number, metrics=metrics, word=combined, under=outcome.under)
        self.lifecycle.prepare(number, outcome.under)
        if combined.stop is not None:
            self.lifecycle.stopped(combined.stop, combined.stop_is_final)
            self._reporter.emit(StopRequested(reason=combined.stop))
        times = self._speed.committed(self.runner.waited_s)
        self._reporter.report(urgent=False, step=number + 1, metrics=metrics, step_s=self._account.step_s, times=times)
        return metrics

    # Between the steps, and after the loop.

    @property
    def behind(self) -> bool:
        """Whether this worker takes no part between steps: it is catching up, or joined after the loop."""
        ledger = self.participant.ledger
        return self._catch_up is not None or self.calls.passed is not None or ledger.worker_id in ledger.idle

    def is_followed(self) -> bool:
        """Return whether a joiner's thread follows generations instead of the main thread."""
        return self._catch_up is not None and self._catch_up.is_followed

    def call(self, name: str, data: bytes) -> list[bytes] | None:
        """Return the bytes of all workers in the call; None if the script may not call here."""
        return self.calls.call(name, data)

    def _regroup_between_steps(self) -> None:
        # The update of the last committed step may be half done: joiners cannot take this state yet.
        self.settled(self._regroup(), level=self.over)

    def end(self) -> None:
        """End the loop; return when all workers have ended it and its last checkpoint is written."""
        if self._catch_up is not None:
            # Nothing is left to take: the last results are replayed.
            left = self._catch_up.next()
            assert left is None, left
            self._catch_up = None
        # First: a worker that joins from here on learns that there are no more steps.
        self.participant.loop_ended()
        if (self.broken_off or self.finished) and not self._ended and self.participant.ledger.idle:
            # A joiner waits for a step that does not come, until all workers regroup.
            self.participant.broke(GroupError("the script left its loop before the last step"))
        self.broken_off = False
        self.over = True
        self.activity.now(Phase.ENDING)
        self.transfer.give()
        self.loop_end.meet()
        self.loop_end.digest = digest(self.leaves())
        self._account.complete()
        self._reporter.report(after_loop=True, step=self.participant.step)

    def pass_over(self, outside: PreLoopCalls) -> None:
        """Skip a loop that the job ended before this worker joined: the script continues after it."""
        self.participant.loop_begun(self._links)
        self.lifecycle.applied = step_at_end(outside, self.participant.loops)
        self.calls.passed = outside
        self.over = True
        self.close()

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
        self._reporter.report(script_ended=True)
        while self._reporter.is_heard and not self._membership.wait_finish(self.participant.ledger.generation):
            # A worker joins that runs the code after the loop in place of a lost one.
            self.settled(self._regroup(), level=True)
        self._reporter.report(complete=True, step=self.participant.step, digest=self.loop_end.digest)
        self._membership.close()

    def _watch_gpu(self, techniques: Chosen) -> GpuWatch | None:
        technique = techniques.get(GpuHealth)
        if technique is None:
            return None
        return watch_gpu(technique.settings, InWorker(technique.name, self.settings, self._reporter))

    def close(self) -> None:
        """Release everything that only the loop needs; collective calls remain possible."""
        self._parameter_set.close()
        self.checks.close()
        self.step_hooks.close()
        if self._gpu is not None:
            self._gpu.close()
        self.lifecycle.close()
        self.exchange.gradients.detach()
        self._exchange_thread.stop()
        self.source.close()
        self._account.flush()

    def abandon(self) -> None:
        """Leave the job: the loop was left in the middle of a step."""
        self.close()
        self._membership.close()

    def repeat_nothing(self) -> None:
        """Compute no microbatch twice to compare its bits."""
        self._consistency.repeats.give_up()

    def give_up(self) -> None:
        """Leave the job if an error left the loop between two steps: nothing continues after it."""
        if self.broken_off:
            self.broken_off = False
            self.abandon()

    def settled(self, settlement: Settlement, level: bool) -> None:
        """Report a settled generation to the lighthouse, to joiners, and to the script's handlers.

        ``level``: whether the state is that of the step that continues; if not, the script's update comes first.
        """
        if self.participant.entered is not None:
            self._account.settled(self.participant.entered)
        # Whether this worker was in a step or before its first: from here on all check the same slices.
        self._consistency.restart(settlement.step + 1)
        self.transfer.settled(settlement)
        if settlement.idle:
            self.calls.tell_joiners()
        if not self.over:
            self.step_hooks.reach("generation_change", lost=self.participant.lost)
        if level:
            self._give()
        self._reporter.entered(settlement, self.participant.ledger.generation, self.participant.lost)

    def _give(self) -> None:
        """Stage the state for joiners. After the loop it is that of the loop's end, or is marked as spoiled."""
        at_end = self.loop_end.digest
        if at_end is not None and self.transfer.is_asked:
            self.lifecycle.spoiled = digest(self.leaves()) != at_end
        self.transfer.give()
