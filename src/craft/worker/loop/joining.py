"""This worker while it joins a running job: take the state, replay the others' steps, then take part.

``TrainingLoop`` calls it on the main thread, in place of the step runner while ``is_behind``: steps then come from the results
that the follower has queued.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from craft.protocol.membership import Settlement
from craft.protocol.values.activity import Phase
from craft.telemetry.fault_points import reach
from craft.worker.checkpoint.lifecycle import CheckpointLifecycle
from craft.worker.loop.step_exchange import StepExchange
from craft.worker.loop.step_runner import StepRunner
from craft.worker.loop.trained_state import TrainedState
from craft.worker.monitor.consistency import ConsistencyCheck
from craft.worker.recovery.follower import CommittedResult, Follower
from craft.worker.recovery.state_transfer import StateTransfer
from craft.worker.reduce.buckets import BucketLayout
from craft.worker.reduce.user_reduce import listen
from craft.worker.state.loop_context import LoopContext

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Joining:
    """The catch-up of one worker, if it needs one. Owned by the main thread."""

    _context: LoopContext
    _state: TrainedState
    _transfer: StateTransfer
    _lifecycle: CheckpointLifecycle
    _consistency: ConsistencyCheck
    _exchange: StepExchange
    _runner: StepRunner
    _follower: Follower | None = field(default=None, init=False)
    """Takes part in the exchange until this worker has caught up."""
    _warmed_up: bool = field(default=False, init=False)

    @property
    def is_behind(self) -> bool:
        """Whether this worker is catching up."""
        return self._follower is not None

    @property
    def has_results(self) -> bool:
        """Whether steps of the others are still to be replayed."""
        return self._follower is not None and self._follower.has_results

    def is_followed(self) -> bool:
        """Return whether the follower's thread follows generations instead of the main thread."""
        return self._follower is not None and self._follower.runs

    def join(self, settlement: Settlement) -> None:
        """Load the others' state, and start catching up; a thread queues their results meanwhile."""
        context, participant, state = self._context, self._context.participant, self._state
        context.reporter.report(urgent=False, behind=True)
        self._follower = Follower(
            participant,
            self._layout_of_the_others,
            state.buffers.empty_like,
            context.source.size_of,
            self._transfer.fetch,
            self._settled,
            participant.broke,
            listen if context.own_loop else None,
        )
        self._follower.start(settlement)
        fetched = self._follower.wait_state()
        progress = self._transfer.load(fetched)
        state.buffers.begin()
        reach("loaded", fetched.level)
        logger.info("took the state as of step %d, %d bytes", fetched.level, fetched.header.total_bytes)
        self._lifecycle.applied = fetched.level
        if not self._exchange.gradients.layout.fits():
            # The state shows which parameters the others train.
            self._exchange.lay_out(state.new_gradients())
        self._transfer.measure()
        self._lifecycle.take(progress)
        self._consistency.joins()

    def _settled(self, settlement: Settlement) -> None:
        """Report a settlement, on the follower's thread; without a current member, joiners take the state from this worker."""
        self._context.reporter.settled(settlement, self._context.participant.ledger.generation)
        self._transfer.settled(settlement)

    def _layout_of_the_others(self, trained: Sequence[bool] | None) -> BucketLayout:
        params, told = self._state.params, self._context.participant.trained
        if trained is None and told:
            bits = int.from_bytes(told, "little")
            trained = [bool(bits >> index & 1) for index in range(len(params))]
        return BucketLayout(params, self._state.bucket_bytes, trained)

    def warms_up(self) -> bool:
        """Return whether to compute one microbatch now, so that first-call costs, such as compilation, delay only this worker.

        Queued results come first: they hold memory, and computing can wait until nothing else is left to do.
        """
        follower = self._follower
        if self._context.link is not None:
            # It cannot compute without its replica, whose other workers have no microbatch either.
            return False
        now = follower is not None and not (self._warmed_up or follower.level or follower.has_results)
        self._warmed_up = self._warmed_up or now
        return now

    def next_result(self) -> CommittedResult | None:
        """Return the next step of the others to replay; None: this worker takes part from here on."""
        if self._follower is None:
            return None
        self._context.activity.now(Phase.EXCHANGING, self._lifecycle.applied)
        if not self._follower.level and (result := self._follower.next()) is not None:
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
        self._follower = None
        self._consistency.newcomer = True
        self._context.reporter.report(urgent=False, behind=False)
        self._context.participant.keep_pace()
        self._consistency.restart(self._lifecycle.applied + 1)
        logger.info("keeps pace with the others from step %d on", step)

    def end(self) -> None:
        """End with the loop: all results are replayed."""
        if self._follower is not None:
            left = self._follower.next()
            assert left is None, left
            self._follower = None
