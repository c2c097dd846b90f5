"""Which hosts are silent. Anything an agent sends is a sign of life; its silence for the limit is its host's end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

DEFAULT_LIMIT_S = 1.0
STALL_SHARE = 0.25
"""A timer that fires later than this share of the limit shows that the lighthouse itself had stopped for a while."""


class Clock(Protocol):
    """A clock that never goes back, and timers on it."""

    def monotonic(self) -> float:
        """Seconds since some moment."""

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call ``call`` after ``delay_s``, from the same thread."""


@dataclass
class _Pulse:
    heard: float
    limit_s: float
    silent: bool = False
    excused: bool = False
    """Whether a stall of this process was taken into account already."""


class Heartbeats:
    """Calls ``on_silent(host, silent_s)`` when a host was not heard for the limit; again only after it came back."""

    def __init__(self, limit_s: float, clock: Clock, on_silent: Callable[[str, float], None]) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._on_silent = on_silent
        self._pulses: dict[str, _Pulse] = {}

    def expect(self, host: str, limit_s: float) -> None:
        """Count on hearing from ``host`` within ``limit_s``, though nothing came from it yet."""
        pulse = self._pulses[host] = _Pulse(self._clock.monotonic(), limit_s)
        self._clock.later(limit_s, lambda: self._look(host, pulse))

    def heard(self, host: str) -> None:
        """``host`` gave a sign of life just now."""
        pulse = self._pulses.get(host)
        if pulse is None or pulse.silent or pulse.limit_s != self._limit_s:
            self.expect(host, self._limit_s)
            return
        pulse.heard, pulse.excused = self._clock.monotonic(), False

    def is_silent(self, host: str) -> bool:
        """Whether ``host`` was not heard for longer than the limit."""
        silent_s = self.silent_s(host)
        return silent_s is not None and silent_s > self._limit_s

    def silent_s(self, host: str) -> float | None:
        """For how long nothing came from ``host``; None if nothing ever did."""
        pulse = self._pulses.get(host)
        return None if pulse is None else self._clock.monotonic() - pulse.heard

    def _look(self, host: str, pulse: _Pulse) -> None:
        """The one timer of a host: looks, then waits for as long as the host may still be silent."""
        if self._pulses[host] is not pulse:
            return
        now = self._clock.monotonic()
        late_s = now - (pulse.heard + pulse.limit_s)
        if late_s > STALL_SHARE * pulse.limit_s and not pulse.excused:
            # This process did not run when it should have: what the host sent meanwhile is still unread.
            pulse.heard, pulse.excused, late_s = now, True, -pulse.limit_s
        if late_s < 0:
            self._clock.later(-late_s, lambda: self._look(host, pulse))
            return
        pulse.silent = True
        self._on_silent(host, now - pulse.heard)
