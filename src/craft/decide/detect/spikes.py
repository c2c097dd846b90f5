"""Find finite spikes: a logged number far above its values in the steps before; answers to these and to NaN."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal

import msgspec

DivergenceAnswer = Literal["report", "skip", "lower-lr", "rollback", "stop"]
"""``report``: log it and go on. ``skip``: the step changes nothing. ``lower-lr``: it changes nothing, and the next ones less.
``rollback``: go back to the newest checkpoint and skip the data since. ``stop``: end the job."""

_NORMAL = 1.4826
"""For normally distributed values, this times the median absolute deviation is the standard deviation."""
_FLAT = 0.01
"""The spread is at least this share of the median: else any change of nearly constant values is a spike."""


class SpikeRule(msgspec.Struct, frozen=True, kw_only=True):
    """When a value is a spike. The first ``window`` values never are."""

    metric: str
    window: int
    deviations: float | None = None
    """More than this many robust deviations above the median of the window."""
    ratio: float | None = None
    """More than this many times the median of the window, where that is above 0."""


def find_spike(value: float, recent: Sequence[float], rule: SpikeRule) -> str | None:
    """Return in words how far ``value`` is above the ``recent`` ones; None if it is not a spike."""
    if len(recent) < rule.window:
        return None
    middle = median(recent)
    where = f"the median of the last {len(recent)} steps, {middle:.6g}"
    if rule.ratio is not None and middle > 0 and value > rule.ratio * middle:
        return f"{rule.metric} is {value:.6g}, {value / middle:.3g} times {where}"
    if rule.deviations is None:
        return None
    spread = max(_NORMAL * median(abs(each - middle) for each in recent), _FLAT * abs(middle))
    if spread > 0 and value - middle > rule.deviations * spread:
        return f"{rule.metric} is {value:.6g}, {(value - middle) / spread:.3g} deviations above {where}"
    return None


def remember(recent: Sequence[float], value: float, rule: SpikeRule) -> tuple[float, ...]:
    """Return the window after ``value``. Spikes count too: a value that stays high becomes normal."""
    return (*recent, value)[-rule.window :]
