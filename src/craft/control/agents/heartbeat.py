"""Find silent hosts: a host whose agent sends nothing for the limit is lost.

If no host is heard, the lighthouse itself is most likely cut off, and it judges no host until one is heard.
``Sessions`` reports who was heard; ``Lighthouse`` gets the silent hosts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

DEFAULT_LIMIT_S = 1.0
STALL_SHARE = 0.25
"""A timer that is late by more than this share of the limit shows that the lighthouse itself had stopped."""
WITNESS_SHARE = 0.5
"""Another host heard within this share of the limit shows that the lighthouse is not cut off. Less than the limit:
when all fall silent at once, the first to be judged was heard only moments before the others."""
RETURN_LIMITS = 3
"""Hosts get this many limits after a restart, and after all were silent: agents retry only so often."""


class Clock(Protocol):
    """A monotonic clock with timers."""

    def monotonic(self) -> float:
        """Seconds since some moment."""

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call ``call`` after ``delay_s``, from the same thread."""


class Watcher(Protocol):
    """Gets the findings of ``Heartbeats``."""

    def on_silent(self, host: str, silent_s: float) -> None:
        """``host`` was not heard for the limit, and others were. Called again only after it came back."""

    def on_alone(self, silent_s: float) -> None:
        """No host was heard for the limit."""

    def on_heard(self, host: str, alone_s: float) -> None:
        """``host`` was heard, the first one after ``on_alone``."""


@dataclass
class _Pulse:
    since: float
    """When its silence begins: its last sign of life, or when one was due."""
    limit_s: float
    due: float = 0.0
    """When its timer checks next."""
    silent: bool = False
    excused: bool = False
    """Whether a stall of this process is already compensated."""


class Heartbeats:
    """Reports hosts that were not heard for the limit to ``watcher``."""

    def __init__(self, limit_s: float, clock: Clock, watcher: Watcher) -> None:
        self.limit_s = limit_s
        """May change at any time; applies to a host from its next sign of life."""
        self._clock = clock
        self._watcher = watcher
        self._pulses: dict[str, _Pulse] = {}
        self._newest: tuple[str, float] | None = None
        """The host heard last, and when."""
        self._another: tuple[str, float] | None = None
        """The latest sign of life of any other host."""
        self._alone_since: float | None = None

    def expect(self, host: str, limit_s: float) -> None:
        """Expect ``host`` within ``limit_s``, though it was not heard yet."""
        pulse = self._pulses[host] = _Pulse(self._clock.monotonic(), limit_s)
        self._look_in(limit_s, host, pulse)

    def heard(self, host: str) -> None:
        """Record a sign of life of ``host``."""
        now = self._clock.monotonic()
        if self._newest is not None and self._newest[0] != host:
            self._another = self._newest
        self._newest = (host, now)
        if self._alone_since is not None:
            self._contact(host, now)
        pulse = self._pulses.get(host)
        if pulse is None or pulse.silent or pulse.limit_s != self.limit_s:
            self.expect(host, self.limit_s)
            return
        pulse.since, pulse.excused = now, False

    def is_silent(self, host: str) -> bool:
        """Return whether ``host`` was not heard for longer than the limit."""
        silent_s = self.silent_s(host)
        return silent_s is not None and silent_s > self.limit_s

    def silent_s(self, host: str) -> float | None:
        """Return how long ``host`` is silent; None if it was never heard."""
        pulse = self._pulses.get(host)
        return None if pulse is None else self._clock.monotonic() - pulse.since

    def _contact(self, host: str, now: float) -> None:
        """Give all hosts time to find this lighthouse again before any is judged."""
        assert self._alone_since is not None
        alone_s, self._alone_since = now - self._alone_since, None
        for other, pulse in list(self._pulses.items()):
            if not pulse.silent:
                self.expect(other, RETURN_LIMITS * self.limit_s)
        self._watcher.on_heard(host, alone_s)

    def _look_in(self, delay_s: float, host: str, pulse: _Pulse) -> None:
        pulse.due = self._clock.monotonic() + delay_s
        self._clock.later(delay_s, lambda: self._look(host, pulse))

    def _look(self, host: str, pulse: _Pulse) -> None:
        """Check a host, then wait for as long as it may still be silent."""
        if self._pulses[host] is not pulse or self._alone_since is not None:
            return
        now = self._clock.monotonic()
        if now - max(pulse.due, pulse.since + pulse.limit_s) > STALL_SHARE * pulse.limit_s and not pulse.excused:
            # This process did not run when it should have: messages of the host are still unread.
            pulse.since, pulse.excused = now, True
        left_s = pulse.since + pulse.limit_s - now
        if left_s > 0:
            self._look_in(left_s, host, pulse)
            return
        self._judge(host, pulse, now)

    def _judge(self, host: str, pulse: _Pulse, now: float) -> None:
        other_s = self._others_silent_s(host, now)
        if other_s < WITNESS_SHARE * self.limit_s:
            pulse.silent = True
            self._watcher.on_silent(host, now - pulse.since)
        elif other_s < self.limit_s:
            # Either the others are heard again soon, or all fell silent at about the same time.
            self._look_in((1 - WITNESS_SHARE) * self.limit_s, host, pulse)
        else:
            self._alone_since = now
            heard = now - self._newest[1] if self._newest is not None else now - pulse.since
            self._watcher.on_alone(heard)

    def _others_silent_s(self, host: str, now: float) -> float:
        """Return how long ago any other host was heard; infinity if none ever was."""
        found = self._another if self._newest is not None and self._newest[0] == host else self._newest
        return now - found[1] if found is not None else float("inf")
