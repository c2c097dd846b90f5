"""The share of time in which a job makes progress, in closed form. ``techniques.py`` builds on these formulas.

Failures arrive at a constant rate. docs/howto/planning.md derives each formula, and a simulation in the tests checks it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import msgspec

from craft.decide.step.interval import first_order

_FAR = 700.0
"""exp() of more than this overflows; no work gets done then."""
_NEVER = 1e-30
"""Rates per second up to this count as zero."""
_SMALL = 1e-12
"""For stalls below this fraction of the time between failures, the first order is exact to machine precision."""


def saved_share(rate: float, interval_s: float, stall_s: float, back_s: float) -> float:
    """Return the productive share of time if each failure leads back to the last checkpoint.

    A checkpoint follows every ``interval_s`` of work and stalls it for ``stall_s``. ``back_s``: the time to begin again, plus
    that from the stall until the checkpoint is usable.
    """
    if rate <= _NEVER:
        return interval_s / (interval_s + stall_s) if interval_s < math.inf else 1.0
    period, back = rate * (interval_s + stall_s), rate * back_s
    if not 0 < period <= _FAR or back > _FAR:
        return 0.0
    return rate * interval_s * math.exp(-back) / math.expm1(period)


def best_interval(rate: float, stall_s: float) -> float:
    """Return the interval with the largest ``saved_share``; infinite if nothing fails.

    It solves 1 - x = exp(-x - rate * stall_s) with x = rate * interval. For a small stall that is ``first_order``.
    """
    if rate <= _NEVER:
        return math.inf
    stall = rate * stall_s
    if stall <= _SMALL:
        return first_order(stall_s, 1 / rate)
    low, high = 0.0, min(1.0, rate * first_order(stall_s, 1 / rate))
    # The root lies below sqrt(2 rate stall_s): the terms beyond the first order only make it smaller.
    while high - low > 1e-14 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if -math.expm1(-middle - stall) > middle else (low, middle)
    return (low + high) / 2 / rate


class Absence(msgspec.Struct, frozen=True, kw_only=True):
    """What follows the loss of a unit: workers that fail together, such as those of a host."""

    rate: float
    """Losses per second."""
    pause_s: float
    """How long the whole job pauses."""
    join_s: float
    """Time from the loss until a spare keeps pace."""
    replace_s: float
    """Time from the loss until another unit arrives and takes the slot, or becomes the next spare."""
    spares: int = 0

    def working(self, num_units: int) -> Iterator[tuple[int, float]]:
        """Yield numbers of missing units while the job works, with probabilities that sum to the share of that time.

        No loss lies within the last ``pause_s``. Losses between that and ``join_s`` ago are missing; of older ones, those that
        exceed the spares.
        """
        joined_s = max(self.join_s if self.spares else 0.0, self.pause_s)
        share = math.exp(-self.rate * self.pause_s)
        for fresh, chance in _poisson(self.rate * (joined_s - self.pause_s), num_units):
            for older, chance_older in _poisson(self.rate * (self.replace_s - joined_s), num_units + self.spares):
                yield fresh + max(0, older - self.spares), share * chance * chance_older

    def end_rate(self, num_units: int) -> float:
        """Return how often the last unit is lost while all others are missing, and the state with it. Spares make it rarer."""
        if num_units == 1:
            return self.rate
        odds = self.rate / num_units * max(self.replace_s, self.pause_s)
        missing = odds / (1 + odds)
        return self.rate * (1 - missing) * missing ** (num_units - 1)


def working_share(absence: Absence, num_units: int, speed: Callable[[int], float]) -> float:
    """Return the productive share of time if survivors go on; ``speed(missing)`` is theirs, 1 with all units."""
    speeds = ((chance, speed(missing)) for missing, chance in absence.working(num_units) if missing < num_units)
    return min(1.0, math.fsum(chance * each for chance, each in speeds))


def _poisson(mean: float, limit: int) -> Iterator[tuple[int, float]]:
    """Yield the numbers below ``limit`` with their probabilities, without negligible ones."""
    if mean <= 0:
        yield 0, 1.0
        return
    reach = 9 * math.sqrt(mean) + 25
    for number in range(max(0, math.floor(mean - reach)), min(limit, math.ceil(mean + reach))):
        yield number, math.exp(number * math.log(mean) - mean - math.lgamma(number + 1))
