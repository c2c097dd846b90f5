"""A token bucket: limits a rate, with a reserve for bursts."""

from __future__ import annotations


class TokenBucket:
    """Fills at ``rate`` per second up to ``burst``. Time is an argument."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._when = now

    def pause_s(self, amount: float, now: float) -> float:
        """Return how long until ``amount`` is available; take nothing."""
        level = min(self._burst, self._level + (now - self._when) * self._rate)
        return max(0.0, (amount - level) / self._rate)

    def take(self, amount: float, now: float) -> float:
        """Take ``amount``, and return for how many seconds the taker pauses; 0 if there was enough."""
        self._level = min(self._burst, self._level + (now - self._when) * self._rate)
        self._when = now
        self._level -= amount
        return max(0.0, -self._level / self._rate)
