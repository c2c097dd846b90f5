"""The cost of each fault: time, from when steps were committed; work, from what was settled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from craft.protocol.events import Recovered
from craft.protocol.generation_log import Entered


class FaultCost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of one generation change after a loss."""

    generation: int
    what: str
    seen: float
    """When the loss was detected, in seconds since 1970."""
    resumed: float | None
    """When the first step of a newer generation was committed; None if the job ended before that."""
    lost_s: float | None
    """Time from the last commit before to the first commit after, less the time of an undisturbed step.

    None if there is no such commit. Before the first commit the workers are still starting: that time is not counted.
    """
    recovered: Recovered | None = None
    """The report of the workers: the work that was done again."""
    steps_lost: int = 0
    """Committed steps that were computed again because every copy of the state was lost."""
    microbatches_lost: int = 0
    """Microbatches in these steps."""


def fault_cost(
    *, generation: int, what: str, seen: float, last_commit: float | None, resumed: float | None, step_s: float
) -> FaultCost:
    """Return the cost of one fault; ``step_s`` is the undisturbed step time before it."""
    lost = None
    if resumed is not None and last_commit is not None:
        lost = max(0.0, resumed - last_commit - step_s)
    return FaultCost(generation=generation, what=what, seen=seen, resumed=resumed, lost_s=lost)


class Setback(msgspec.Struct, frozen=True, kw_only=True):
    """What was lost since the last commit, as far as it is settled."""

    since: int
    """The generation of that commit; 0 if there was none."""
    teller: str
    """The member that reports it after the next commit: the first one that took part before."""
    lost: tuple[str, ...]
    step: int
    """The step of ``redone`` and ``dropped``."""
    retried: tuple[int, ...]
    redone: tuple[int, ...]
    dropped: tuple[int, ...]


def set_back(before: Setback | None, since: int, entered: Entered) -> Setback:
    """Add a newly settled generation to ``before``, the setback since the last commit.

    A microbatch that is lost twice before the step is committed counts once.
    """
    same = before is not None and before.step == entered.step
    known = [member for member in entered.members if member not in (*entered.joiners, *entered.idle)]
    redone = {*entered.given, *entered.again, *(before.redone if before is not None and same else ())}
    return Setback(
        since=since,
        teller=(known or [member for member in entered.members if member not in entered.joiners])[0],
        lost=tuple(sorted({*entered.lost, *(before.lost if before is not None else ())})),
        step=entered.step,
        retried=tuple(
            sorted({*([entered.step] if entered.retried else []), *(before.retried if before is not None else ())})
        ),
        # Under ``shrink`` a microbatch that was to be redone may be dropped after all.
        redone=tuple(sorted(redone - set(entered.dropped))),
        dropped=entered.dropped,
    )


def recovered(
    setback: Setback,
    *,
    worker_id: str,
    generation: int,
    step: int,
    lost_s: float | None,
    samples: Callable[[int, int], int | None],
    now: float,
) -> Recovered:
    """Return the report after the first commit; ``samples(step, microbatch)`` is None where only the script knows."""
    return Recovered(
        worker_id=worker_id,
        generation=generation,
        since=setback.since,
        lost=setback.lost,
        step=step,
        lost_s=lost_s,
        retried=setback.retried,
        redone=setback.redone,
        dropped=setback.dropped,
        redone_samples=_total([samples(setback.step, each) for each in setback.redone]),
        dropped_samples=_total([samples(setback.step, each) for each in setback.dropped]),
        committed_at=now,
    )


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def goodput(wall_s: float, costs: Sequence[FaultCost], *, steps: int) -> float | None:
    """Return the share of time not lost to faults, between 0 and 1; None if no step was committed."""
    if steps == 0 or wall_s <= 0:
        return None
    lost = sum(cost.lost_s or 0.0 for cost in costs)
    return max(0.0, min(1.0, 1.0 - lost / wall_s))
