"""What each fault cost, from the times at which steps were committed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class FaultCost(msgspec.Struct, frozen=True, kw_only=True):
    """One generation change for a loss, and the time it took from training."""

    generation: int
    what: str
    seen: float
    """When the loss was seen, in seconds since 1970."""
    resumed: float | None
    """When the first step of a newer generation was committed; None if the job ended before."""
    lost_s: float | None
    """Time from the last commit before to the first one after, less the time that such a step takes undisturbed."""


def fault_cost(
    *, generation: int, what: str, seen: float, last_commit: float | None, resumed: float | None, step_s: float
) -> FaultCost:
    """Return the cost of one fault; ``step_s`` is the undisturbed step time before it."""
    lost = None
    if resumed is not None:
        lost = max(0.0, resumed - (last_commit if last_commit is not None else seen) - step_s)
    return FaultCost(generation=generation, what=what, seen=seen, resumed=resumed, lost_s=lost)


def goodput(wall_s: float, costs: Sequence[FaultCost]) -> float:
    """The share of the time that was not lost to faults, between 0 and 1."""
    lost = sum(cost.lost_s or 0.0 for cost in costs)
    return max(0.0, min(1.0, 1.0 - lost / wall_s)) if wall_s > 0 else 1.0
