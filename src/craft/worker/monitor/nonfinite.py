"""Detect non-finite numbers and spikes; every worker finds the same in the same step, since all have the same result.

``StepResult`` checks each result before it reaches the script; ``CheckpointLifecycle`` acts on it at the step boundary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed

from craft.decide.detect.spikes import DivergenceAnswer, SpikeRule, find_spike, remember
from craft.decide.techniques.technique import Hooks, Moment
from craft.protocol.errors import CraftError
from craft.protocol.events import NumbersDiverged
from craft.worker.reduce.buckets import BucketLayout
from craft.worker.state.metadata import TrainingProgress

logger = logging.getLogger(__name__)

_LOWER_BY = 0.1
_LOWER_STEPS = 100
_MOST_ROLLBACKS = 3
"""To the same checkpoint."""

_ANSWERS: dict[DivergenceAnswer, str] = {
    "report": "nothing is done about it",
    "skip": "the step changes nothing",
    "lower-lr": f"the step changes nothing, and learning rates are lowered to {_LOWER_BY:g} for {_LOWER_STEPS} steps",
    "rollback": "the job goes back to the newest checkpoint and leaves out the data since",
    "stop": "the job ends",
}


class NotFinite(CraftError):
    """A loss or gradient is not finite or a spike, and the job must end. Raised on every worker in the same step."""


class NonFiniteGuard(Hooks):
    """Hooks of the technique ``divergence``; it also decides whether a result may change the state."""

    def __init__(
        self,
        answer: DivergenceAnswer | None,
        registered: Iterable[Any],
        report: Callable[[NumbersDiverged], None],
        spikes: SpikeRule | None = None,
        *,
        is_sharded: bool = False,
    ) -> None:
        """Without an answer, no number is checked. ``spikes``: which finite numbers count, too.

        ``is_sharded``: each worker of a replica has a part of the gradients, and all have to find the same.
        """
        self._is_sharded = is_sharded
        self._report = report
        self._spikes = spikes
        self._warned = False
        """Whether it has warned that the metric to check for spikes is missing."""
        self.recent: tuple[float, ...] = ()
        """Newest values of that metric, the same on every worker."""
        items = list(registered)
        self._answer = answer
        # A gradient scaler tries how large gradients may become: it expects and handles non-finite ones.
        self._scales = any(isinstance(item, torch.amp.GradScaler) for item in items)
        self._optimizers = [item for item in items if isinstance(item, torch.optim.Optimizer)]
        self._step = 0
        self._bad = False
        """Whether the step before was not finite."""
        self._rates: list[list[Any]] = []
        self._rollbacks: tuple[int, int] = (0, 0)
        self.lowered_until = 0
        self.due: NumbersDiverged | None = None
        """What was found in the last committed step."""
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(self._lower)
            optimizer.register_step_post_hook(self._restore)

    def load(self, progress: TrainingProgress) -> None:
        self.lowered_until = progress.lowered_until
        self.recent = progress.recent

    def check(
        self, step: int, metrics: Sequence[tuple[str, float]], layout: BucketLayout, flats: Sequence[torch.Tensor]
    ) -> bool:
        """Check the result of ``step``; return whether it may change the state."""
        self._step = step
        if self._answer is None:
            return True
        what = self._found(metrics, layout, flats) or self._spike(step, dict(metrics))
        again, self._bad = self._bad, what is not None
        self.due = None
        # With "report" it is reported once: weights that are not finite stay so.
        if what is None or (again and self._answer == "report"):
            return True
        self.due = NumbersDiverged(step=step, what=what, answer=_ANSWERS[self._answer])
        if self._answer == "lower-lr":
            self.lowered_until = step + 1 + _LOWER_STEPS
        return self._answer == "report"

    def _found(
        self, metrics: Sequence[tuple[str, float]], layout: BucketLayout, flats: Sequence[torch.Tensor]
    ) -> str | None:
        for name, value in metrics:
            if not math.isfinite(value):
                return f"{name} is {value}"
        if self._scales:
            return None
        found = self._found_here(layout, flats)
        return found if not self._is_sharded else _found_anywhere(found)

    @staticmethod
    def _found_here(layout: BucketLayout, flats: Sequence[torch.Tensor]) -> str | None:
        # First all sums, read at once since reading waits for the device: they are fast, and finite unless something is wrong.
        # An infinite sum may be an overflow: then check each element.
        sums = torch.stack([_parts(flat).sum().double() for flat in flats]).tolist() if flats else []
        for bucket, flat, total in zip(layout.buckets, flats, sums, strict=True):
            if not math.isfinite(total) and not bool(torch.isfinite(_parts(flat)).all()):
                return f"a gradient is not finite (bucket of parameters {bucket.param_indices[0]} to {bucket.param_indices[-1]})"
        return None

    def _spike(self, step: int, metrics: dict[str, float]) -> str | None:
        """Describe a spike of the watched metric, None if there is none; add its value to the recent ones."""
        rule = self._spikes
        if rule is None:
            return None
        if (value := metrics.get(rule.metric)) is None:
            if not self._warned:
                logger.warning(
                    "step %d: cannot check for spikes in %r, which the script did not log in it (it logged: %s): choose a metric"
                    " with --set divergence.spike_metric=NAME", step, rule.metric, ", ".join(metrics) or "nothing",
                )  # fmt: skip
            self._warned = True
            return None
        found = find_spike(value, self.recent, rule)
        self.recent = remember(self.recent, value, rule)
        return found

    def leave_out(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Remove the gradients, so that the script's update changes nothing."""
        for param in params:
            if self._scales and param.grad is not None:
                # A scaler needs gradients to check, and skips a step in which it finds infinite ones.
                param.grad.fill_(float("inf"))
            else:
                param.grad = None

    @property
    def goes_back(self) -> bool:
        return self.due is not None and self._answer == "rollback"

    def after_commit(self, moment: Moment) -> None:
        """Report what was found; raise NotFinite if the job must end."""
        if self.due is None:
            return
        self._report(self.due)
        if self._answer == "stop":
            raise NotFinite(f"{self.due.what} in step {self.due.step}: the job ends, as --on-divergence stop says")

    def went_back(self, step: int) -> None:
        """Count rollbacks to the checkpoint of ``step``; raise NotFinite after too many."""
        last, times = self._rollbacks
        self._rollbacks = (step, times + 1 if step == last else 1)
        if self._rollbacks[1] > _MOST_ROLLBACKS:
            raise NotFinite(
                f"the job went back to the checkpoint of step {step} {_MOST_ROLLBACKS} times, each time with other data, and"
                " still diverges: lower the learning rate, or clip gradients"
            )

    def _lower(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Lower the rates before the script's ``optimizer.step()``. Schedulers never see the lowered rate."""
        if self._step < self.lowered_until:
            self._rates.append([group["lr"] for group in optimizer.param_groups])
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * _LOWER_BY

    def _restore(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._rates:
            for group, rate in zip(optimizer.param_groups, self._rates.pop(), strict=True):
                group["lr"] = rate


def _found_anywhere(found: str | None) -> str | None:
    """Return what any worker of the replica found; a worker without its replica takes that from a twin."""
    flag = torch.tensor([found is not None], dtype=torch.uint8)
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
    return found or ("a gradient is not finite (at another position of the replica)" if flag.item() else None)


def _parts(values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` as real numbers: both parts of complex ones."""
    return torch.view_as_real(values) if values.is_complex() else values
