"""Finite spikes: a logged number that is far above what it was in the steps before."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

_NORMAL = 1.4826
"""For normal values, this times the median distance from their median is their standard deviation."""
_FLAT = 0.01
"""Values that hardly differ are taken to spread by this share of their median: else any change would be a spike."""


class SpikeRule(msgspec.Struct, frozen=True, kw_only=True):
    """When a value is a spike. The first ``window`` values never are."""

    metric: str
    window: int
    deviations: float | None = None
    """By more than so many robust deviations above the median of the window."""
    ratio: float | None = None
    """More than this many times the median of the window, where that is above 0."""


def find_spike(value: float, recent: Sequence[float], rule: SpikeRule) -> str | None:
    """Return in words by how much ``value`` is above the ``recent`` ones; None if it is no spike."""
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
    """The window after ``value``. A spike is kept, too: what stays high is the new normal after half a window."""
    return (*recent, value)[-rule.window :]
