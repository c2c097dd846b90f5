"""Record and report each committed step: in the step log, to the lighthouse, to techniques and to the script."""

from __future__ import annotations

from msgspec import UNSET

from craft.protocol.errors import ConfigError
from craft.protocol.events import StopRequested
from craft.protocol.membership import Generation, Slot
from craft.protocol.values.activity import Phase
from craft.snapshots.state.device_copy import hold_back
from craft.snapshots.state.leaves import STATE_IS_BUILT
from craft.worker.checkpoint.lifecycle import CheckpointLifecycle
from craft.worker.loop.inner_loop.hooks import StepHooks
from craft.worker.loop.step_result import StepOutcome
from craft.worker.membership.group_opening import mates_of
from craft.worker.monitor.stragglers import SpeedTracker
from craft.worker.recovery.state_transfer import StateTransfer
from craft.worker.reduce.word_parts import LoopPart
from craft.worker.report.step_log import Committed, StepAccount
from craft.worker.state.loop_context import LoopContext


class StepReport:
    """The work after each commit of one loop. Owned by the main thread."""

    def __init__(
        self,
        context: LoopContext,
        speed: SpeedTracker,
        lifecycle: CheckpointLifecycle,
        transfer: StateTransfer,
        hooks: StepHooks,
    ) -> None:
        self._participant = context.participant
        self._membership = context.membership
        self._activity = context.activity
        self._reporter = context.reporter
        self.account = StepAccount(
            context.settings.run_dir,
            context.settings.worker_id,
            context.reporter.note,
            context.source.samples,
            context.reporter.unwritten,
        )
        self._speed = speed
        self._lifecycle = lifecycle
        self._transfer = transfer
        self._hooks = hooks
        self.ended = False
        """Whether the loop ends with the last committed step."""

    def word_part(self, step: int, num_computed: int) -> LoopPart:
        """Return what the loop adds to the word of ``step``, of which ``num_computed`` microbatches were computed here."""
        return LoopPart(
            stop=self._lifecycle.stop_reason or self._membership.winding_down,
            stop_is_final=self._lifecycle.stop_reason is not None and self._lifecycle.stop_is_final,
            busy_us=self._speed.busy_us(num_computed),
            checkpoint=self._lifecycle.word_part(step),
        )

    def committed(self, outcome: StepOutcome, waited_s: float) -> dict[str, float]:
        """Report a step before the script's update of it; return its metrics.

        ``waited_s``: how long this worker waited for the others in its exchange.
        """
        combined, lifecycle = outcome.combined, self._lifecycle
        number = combined.step
        if combined.empty:
            raise ConfigError(
                f"no stream has data from step {number} on: there is nothing left to train on"
                if number
                else "the stream ended before it gave any data: there is nothing to train on"
            )
        # The script's update comes next, while a joiner or a checkpoint may still read the state before it.
        hold_back()
        metrics = dict(combined.metrics)
        lifecycle.compare(number, metrics)
        self._record(outcome, metrics)
        self.ended = combined.ended or combined.stop is not None
        lifecycle.applied = number + 1
        self._hooks.reach("after_commit", step=number, metrics=metrics, word=combined, under=outcome.under)
        lifecycle.prepare(number, outcome.under)
        if combined.stop is not None:
            lifecycle.stopped(combined.stop, combined.stop_is_final)
            self._reporter.emit(StopRequested(reason=combined.stop))
        times = self._speed.committed(waited_s)
        self._reporter.report(urgent=False, step=number + 1, metrics=metrics, step_s=self.account.step_s, times=times)
        return metrics

    def _record(self, outcome: StepOutcome, metrics: dict[str, float]) -> None:
        number, ledger = outcome.combined.step, self._participant.ledger
        slot, mates = _replica_of(outcome.under, ledger.worker_id)
        self.account.committed(
            Committed(
                step=number,
                branch=ledger.branch,
                generation=outcome.generation,
                members=outcome.members,
                plan=outcome.plan,
                metrics=metrics,
                slot=slot,
                mates=mates,
            )
        )
        self._activity.committed()
        self._activity.now(Phase.UPDATING, number)
        self._transfer.committed(computed=(mates[0] if mates else ledger.worker_id) in outcome.plan)
        if number == STATE_IS_BUILT and self._reporter.is_heard:
            self._reporter.report(urgent=False, carried_bytes=self._transfer.measure())


def _replica_of(generation: Generation, worker_id: str) -> tuple[Slot | None, tuple[str, ...]]:
    """Return a member's slot and the workers of its replica; (None, ()) where every replica is one worker."""
    rank = generation.rank_of(worker_id)
    slot = UNSET if rank is None else generation.members[rank].slot
    if slot is UNSET:
        return None, ()
    return slot, tuple(mate.worker_id for mate in mates_of(generation, worker_id))
