"""Hand a committed step's result to the script's update, and record how it was computed.

Input: the committed attempt, from this worker or, while it is catching up, from the others. Output: ``p.grad``, buffers, and a
``StepOutcome``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from craft.protocol.control_word import Combined
from craft.protocol.membership import Generation
from craft.worker.monitor.nonfinite import NonFiniteGuard
from craft.worker.reduce.buckets import BucketLayout
from craft.worker.reduce.exchange import Attempt
from craft.worker.reduce.flats import hand_out
from craft.worker.reduce.module_buffers import ModuleBuffers
from craft.worker.state.carried_state import CarriedState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """How one step was committed."""

    combined: Combined
    plan: tuple[str | None, ...]
    """Worker that computed each microbatch; None for one that was dropped."""
    generation: int
    members: tuple[str, ...]
    """The generation under which this worker committed the step, and its members."""
    under: Generation
    """The generation that produced the result: the same on every worker, whenever each committed it."""


class StepResult:
    """Hands results to the script. Owned by the main thread."""

    def __init__(self, buffers: ModuleBuffers, lanes: CarriedState, numbers: NonFiniteGuard) -> None:
        self.last: StepOutcome | None = None
        """Outcome of the last committed step."""
        self._buffers = buffers
        self._lanes = lanes
        self._numbers = numbers
        self._told = False
        """Whether the warning about missing gradients was logged."""

    @torch.no_grad()
    def give(self, attempt: Attempt, layout: BucketLayout, generation: int, members: tuple[str, ...]) -> None:
        """Hand the result to the user's update code: gradients, buffers, metrics."""
        combined = attempt.combined
        assert combined is not None and attempt.under is not None
        if combined.total_weight and layout.buckets and not (any(combined.present) or self._told):
            self._told = True
            logger.warning(
                "step %d: no parameter got a gradient. loss.backward() in the inner loop makes them; what is put into p.grad"
                " by hand is not seen", attempt.step,
            )  # fmt: skip
        num_present = sum(1 for worker_id in attempt.plan if worker_id is not None)
        scale = num_present / combined.total_weight if combined.total_weight else 1.0
        hand_out(layout, attempt.result, combined.present, scale)
        # If the total weight is zero, the logged values are for display only.
        metrics = combined.metrics if combined.total_weight else ()
        if self._numbers.check(attempt.step, metrics, layout, attempt.result.tensors):
            self._buffers.commit(combined.buffers, attempt.buffers)
            self._lanes.commit(combined.carried, attempt.carried)
        else:
            self._numbers.leave_out([param for bucket in layout.buckets for param in bucket.params])
            self._buffers.commit((), None)
        self.last = StepOutcome(combined, attempt.plan, generation, members, attempt.under)
