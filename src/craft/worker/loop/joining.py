"""This worker while it joins a running job: take the state, replay the others' steps, then take part.

``TrainingLoop`` calls it on the main thread, in place of the step runner while ``is_behind``.
"""

from __future__ import annotations

import logging

from craft.protocol.membership import Settlement
from craft.protocol.values.activity import Phase
from craft.worker.checkpoint.lifecycle import CheckpointLifecycle
from craft.worker.loop.step_exchange import StepExchange
from craft.worker.loop.step_runner import StepRunner
from craft.worker.loop.trained_state import TrainedState
from craft.worker.monitor.consistency import ConsistencyCheck
from craft.worker.recovery.catch_up import CatchUp
from craft.worker.recovery.follower import CommittedResult
from craft.worker.recovery.state_transfer import StateTransfer
from craft.worker.state.loop_context import LoopContext

logger = logging.getLogger(__name__)


class Joining:
    """The catch-up of one worker, if it needs one. Owned by the main thread."""

    def __init__(
        self,
        context: LoopContext,
        state: TrainedState,
        transfer: StateTransfer,
        lifecycle: CheckpointLifecycle,
        consistency: ConsistencyCheck,
        exchange: StepExchange,
        runner: StepRunner,
    ) -> None:
        self._context = context
        self._state = state
        self._transfer = transfer
        self._lifecycle = lifecycle
        self._consistency = consistency
        self._exchange = exchange
        self._runner = runner
        self._catch_up: CatchUp | None = None

    @property
    def is_behind(self) -> bool:
        """Whether this worker is catching up."""
        return self._catch_up is not None

    @property
    def has_results(self) -> bool:
        """Whether steps of the others are still to be replayed."""
        return self._catch_up is not None and self._catch_up.has_results

    def is_followed(self) -> bool:
        """Return whether a joiner's thread follows generations instead of the main thread."""
        return self._catch_up is not None and self._catch_up.is_followed

    def join(self, settlement: Settlement) -> None:
        """Take the state of a running job, and start catching up."""
        context, state = self._context, self._state
        context.reporter.report(urgent=False, behind=True)
        self._catch_up = CatchUp(
            context.participant,
            self._transfer,
            context.reporter,
            state.params,
            state.buffers,
            context.source.size_of,
            state.bucket_bytes,
            context.own_loop,
        )
        self._lifecycle.applied, progress = self._catch_up.take_state(settlement)
        if not self._exchange.gradients.layout.fits():
            # The state shows which parameters the others train.
            self._exchange.lay_out(state.new_gradients())
        self._transfer.measure()
        self._lifecycle.take(progress)
        self._consistency.joins()

    def warms_up(self) -> bool:
        """Return whether to compute one microbatch now, before it counts."""
        return self._catch_up is not None and self._catch_up.warms_up()

    def next_result(self) -> CommittedResult | None:
        """Return the next step of the others to replay; None: this worker takes part from here on."""
        if self._catch_up is None:
            return None
        self._context.activity.now(Phase.EXCHANGING, self._lifecycle.applied)
        if self._catch_up.catches_up and (result := self._catch_up.next()) is not None:
            return result
        self._take_part(self._lifecycle.applied)
        # If no current member is left, joiners wait for this state. Warming up has changed the buffers.
        self._state.buffers.restore()
        self._transfer.give()
        # The last replayed step may have agreed on a generation to enter at this boundary.
        self._runner.keep_pace()
        return None

    def replay(self, result: CommittedResult) -> None:
        """Hand the script the result of a step that was committed without it."""
        self._runner.replay(result)
        if result.able:
            # It tells all workers that this one has caught up, and they include it from the next step on.
            self._take_part(self._lifecycle.applied + 1)

    def _take_part(self, step: int) -> None:
        """Take part in the exchange from ``step`` on; the next control word tells the others."""
        self._catch_up = None
        self._consistency.newcomer = True
        self._context.reporter.report(urgent=False, behind=False)
        self._context.participant.keep_pace()
        self._consistency.restart(self._lifecycle.applied + 1)
        logger.info("keeps pace with the others from step %d on", step)

    def end(self) -> None:
        """End with the loop: all results are replayed."""
        if self._catch_up is not None:
            left = self._catch_up.next()
            assert left is None, left
            self._catch_up = None
