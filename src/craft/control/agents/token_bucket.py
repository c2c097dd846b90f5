"""A token bucket: how much may come in a while, with a reserve for what comes all at once."""

from __future__ import annotations


class TokenBucket:
    """Fills at ``rate`` per second up to ``burst``. Time is an argument."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._when = now

    def pause_s(self, amount: float, now: float) -> float:
        """For how long there is not enough to take ``amount``; takes nothing."""
        level = min(self._burst, self._level + (now - self._when) * self._rate)
        return max(0.0, (amount - level) / self._rate)

    def take(self, amount: float, now: float) -> float:
        """Take ``amount`` out, and return for how many seconds the one who took it is to pause; 0 if there was enough."""
        self._level = min(self._burst, self._level + (now - self._when) * self._rate)
        self._when = now
        self._level -= amount
        return max(0.0, -self._level / self._rate)
