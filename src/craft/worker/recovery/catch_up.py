"""Take the others' state and catch up with them, on a worker that joins a running job.

``TrainingLoop`` creates a ``CatchUp`` when this worker has no state, and drops it when this worker takes part like all others:
until then, or until ``catches_up`` is false, steps come from the results that the follower has queued.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from craft.protocol.membership import Settlement
from craft.telemetry.fault_points import reach
from craft.worker.membership.participant import Participant
from craft.worker.recovery.follower import CommittedResult, Follower
from craft.worker.recovery.state_transfer import StateTransfer
from craft.worker.reduce.buckets import BucketLayout
from craft.worker.reduce.module_buffers import ModuleBuffers
from craft.worker.reduce.user_reduce import listen
from craft.worker.report.reporter import Reporter
from craft.worker.state.metadata import TrainingProgress

logger = logging.getLogger(__name__)


class CatchUp:
    """Replays the others' steps on a joiner. Owned by the main thread."""

    def __init__(
        self,
        participant: Participant,
        transfer: StateTransfer,
        reporter: Reporter,
        params: Sequence[torch.nn.Parameter],
        buffers: ModuleBuffers,
        size_of: Callable[[int], int],
        bucket_bytes: int,
        own_loop: bool = False,
    ) -> None:
        self._participant = participant
        self._transfer = transfer
        self._reporter = reporter
        self._params = params
        self._buffers = buffers
        self._bucket_bytes = bucket_bytes
        self._warmed_up = False
        self._follower = Follower(
            participant,
            self._layout_of_the_others,
            buffers.empty_like,
            size_of,
            transfer.fetch,
            self._settled,
            participant.broke,
            listen if own_loop else None,
        )

    def take_state(self, settlement: Settlement) -> tuple[int, TrainingProgress]:
        """Load the others' state while a thread queues their results; return the state's step and progress."""
        self._follower.start(settlement)
        fetched = self._follower.wait_state()
        progress = self._transfer.load(fetched)
        self._buffers.begin()
        reach("loaded", fetched.level)
        logger.info("took the state as of step %d, %d bytes", fetched.level, fetched.header.total_bytes)
        return fetched.level, progress

    def _settled(self, settlement: Settlement) -> None:
        """Report a settlement, on the follower's thread; without a current member, joiners take the state from this worker."""
        self._reporter.settled(settlement, self._participant.ledger.generation)
        self._transfer.settled(settlement)

    def _others_train(self) -> list[bool]:
        bits = int.from_bytes(self._participant.trained, "little")
        return [bool(bits >> index & 1) for index in range(len(self._params))]

    def _layout_of_the_others(self, trained: Sequence[bool] | None) -> BucketLayout:
        if trained is None and self._participant.trained:
            trained = self._others_train()
        return BucketLayout(self._params, self._bucket_bytes, trained)

    @property
    def catches_up(self) -> bool:
        """Whether results are queued, or will be: the script is behind the others."""
        return not self._follower.level

    def warms_up(self) -> bool:
        """Return whether to compute one microbatch now, so that first-call costs, such as compilation, delay only this worker.

        Queued results come first: they hold memory, and computing can wait until nothing else is left to do.
        """
        now = not self._warmed_up and self.catches_up and not self._follower.has_results
        self._warmed_up = self._warmed_up or now
        return now

    @property
    def has_results(self) -> bool:
        """Whether a result is queued that can be replayed at once."""
        return self._follower.has_results

    @property
    def is_followed(self) -> bool:
        """Whether a thread follows generations instead of the main thread."""
        return self._follower.runs

    def next(self) -> CommittedResult | None:
        """Return the next result for the script; None after the last."""
        return self._follower.next()
