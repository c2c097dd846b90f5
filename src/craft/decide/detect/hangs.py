"""Find hanging workers from what each main thread does, for how long, and how long it usually takes.

The agent asks about its workers every 0.1 s (``overdue``, ``stopped``, ``held_up``). ``policies/detected`` knows what all
members do and decides which of them blocks the others. Times are seconds on one clock.
"""

from __future__ import annotations

from math import inf
from typing import Annotated, Literal

import msgspec

from craft.protocol.values.activity import Doing, Phase
from craft.protocol.values.config import says

NEVER_OVERDUE = frozenset({Phase.STARTING, Phase.JOINING, Phase.EXCHANGING, Phase.CALLING, Phase.PAUSED, Phase.ENDING})
"""Phases that end when others act, or whose length only the script knows."""
WAITING = frozenset({Phase.EXCHANGING, Phase.CALLING})
"""Phases that end when others act."""

FIRST_STEPS = 3
"""Measurements count after this many committed steps: before, a worker compiles, fills caches, warms up."""

STOPPED = "T"
TRACED = "t"
DEAD = frozenset("ZXx")


class HangLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a worker counts as hanging."""

    limit_s: Annotated[
        float, msgspec.Meta(ge=0.0), says("Nothing that a worker does is taken for a hang before this.")
    ] = 10.0
    factor: Annotated[
        float,
        msgspec.Meta(gt=0.0, le=1e9),
        says("It is after this many times the longest that it took recently on the same worker."),
    ] = 20.0
    first_step_limit_s: Annotated[
        float,
        msgspec.Meta(ge=0.0),
        says("Holds instead in the first steps of a worker, and for what it never completed before."),
    ] = 600.0
    update_limit_s: Annotated[
        float,
        msgspec.Meta(ge=0.0),
        says("Code after the inner loop (updates, validation, saving) is not taken for a hang before this."),
    ] = 120.0
    stop_limit_s: Annotated[
        float,
        msgspec.Meta(ge=0.0),
        says("A worker that is stopped by a signal is lost after this, whatever it is doing."),
    ] = 0.5


NO_HANGS = HangLimits(limit_s=inf, first_step_limit_s=inf, update_limit_s=inf, stop_limit_s=inf)
"""No worker ever counts as hanging."""

Cause = Literal["slow", "gil", "stopped", "waiting"]


class Overdue(msgspec.Struct, frozen=True, kw_only=True):
    """A worker takes too long."""

    cause: Cause
    """slow: its phase takes too long; gil: one of its threads keeps the GIL; stopped: by a signal; waiting: for others."""
    doing: Doing | None
    """None: it was stopped before its first report."""
    elapsed_s: float
    limit_s: float

    @property
    def phase(self) -> str:
        """The phase, or ``stopped``, or ``gil``."""
        if self.cause in ("stopped", "gil") or self.doing is None:
            return self.cause
        return self.doing.phase.word

    @property
    def words(self) -> str:
        """For people: ``computing microbatch 3 of step 41 for 12.3 s (limit 10 s)``."""
        times = f"for {self.elapsed_s:.1f} s (limit {round(self.limit_s, 1):g} s)"
        doing = "starting" if self.doing is None else self.doing.words
        if self.cause == "stopped":
            return f"stopped by a signal {times} while {doing}"
        if self.cause == "gil":
            return f"{doing}, but one of its threads has kept the GIL {times}"
        return f"{doing} {times}{self._advice}"

    @property
    def _advice(self) -> str:
        if self.doing is None or self.doing.phase is not Phase.UPDATING:
            return ""
        return (
            "; if that is long work of one worker, such as a validation or a save, put it into `with job.paused(...)`, or let"
            " job.once(...) do it"
        )


def limit_for(doing: Doing, limits: HangLimits) -> float | None:
    """Return how long this phase may take on this worker; None: no limit."""
    return None if doing.phase in NEVER_OVERDUE else _usual_limit(doing, limits)


def _usual_limit(doing: Doing, limits: HangLimits) -> float:
    longest = doing.longest[doing.phase]
    # Code between the steps takes no time in most steps, and minutes in some.
    least = max(limits.limit_s, limits.update_limit_s) if doing.phase is Phase.UPDATING else limits.limit_s
    first = max(limits.first_step_limit_s, least)
    if doing.commits < FIRST_STEPS or longest is None:
        return first
    # One step that compiled for minutes must not make the limit an hour: the factor is capped at the limit of first
    # steps, unless a phase really takes that long.
    return max(least, min(limits.factor * longest, max(first, 2 * longest)))


def overdue(doing: Doing, now: float, limits: HangLimits) -> Overdue | None:
    """Return whether a worker takes too long for its phase."""
    limit = limit_for(doing, limits)
    elapsed = now - doing.since
    if limit is not None:
        return Overdue(cause="slow", doing=doing, elapsed_s=elapsed, limit_s=limit) if elapsed > limit else None
    if doing.phase in WAITING and doing.beat is not None:
        # Without the GIL it would stay in the exchange for ever, like those that wait for it.
        kept = now - doing.beat
        if kept > limits.limit_s:
            return Overdue(cause="gil", doing=doing, elapsed_s=kept, limit_s=limits.limit_s)
    return None


def held_up(doing: Doing, now: float, limits: HangLimits) -> Overdue | None:
    """Return whether a worker waits for others for longer than ever. The cause is elsewhere.

    In a call between the steps the limit is short: others may never come there, which re-forming the group reveals.
    """
    limit = limits.limit_s if doing.phase is Phase.CALLING else _usual_limit(doing, limits)
    elapsed = now - doing.since
    if doing.phase not in WAITING or elapsed <= limit:
        return None
    return Overdue(cause="waiting", doing=doing, elapsed_s=elapsed, limit_s=limit)


def stopped(state: str, since: float, now: float, doing: Doing | None, limits: HangLimits) -> Overdue | None:
    """Return whether a process is stopped for too long; ``state`` is the kernel's letter, first seen at ``since``.

    A process under a debugger (``t``) may be stopped for any time.
    """
    elapsed = now - since
    if state != STOPPED or elapsed <= limits.stop_limit_s:
        return None
    return Overdue(cause="stopped", doing=doing, elapsed_s=elapsed, limit_s=limits.stop_limit_s)
