"""Which hosts are silent. Anything an agent sends is a sign of life; its silence for the limit is its host's end.

Unless nobody is heard: then it is most likely this lighthouse that is cut off, and no host is judged until one is heard.
``Sessions`` says who was heard; ``Lighthouse`` gets the hosts that fell silent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

DEFAULT_LIMIT_S = 1.0
STALL_SHARE = 0.25
"""A timer that fires later than this share of the limit shows that the lighthouse itself had stopped for a while."""
WITNESS_SHARE = 0.5
"""Another host heard within this share of the limit shows that the lighthouse is not cut off. Not the whole limit:
when everybody falls silent at once, the first to be judged was heard only moments before the others."""
RETURN_LIMITS = 3
"""After a restart, and after everybody was silent, hosts have this many limits: agents look for the lighthouse only so
often."""


class Clock(Protocol):
    """A clock that never goes back, and timers on it."""

    def monotonic(self) -> float:
        """Seconds since some moment."""

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call ``call`` after ``delay_s``, from the same thread."""


class Watcher(Protocol):
    """Who wants to know."""

    def on_silent(self, host: str, silent_s: float) -> None:
        """``host`` was not heard for the limit, and others were. Called again only after it came back."""

    def on_alone(self, silent_s: float) -> None:
        """No host at all was heard for the limit."""

    def on_heard(self, host: str, alone_s: float) -> None:
        """``host`` was heard, the first one after ``on_alone``."""


@dataclass
class _Pulse:
    since: float
    """Its silence counts from here: from its last sign of life, or from when one was to be expected."""
    limit_s: float
    due: float = 0.0
    """When its timer is to look."""
    silent: bool = False
    excused: bool = False
    """Whether a stall of this process was taken into account already."""


class Heartbeats:
    """Tells ``watcher`` of hosts that were not heard for the limit."""

    def __init__(self, limit_s: float, clock: Clock, watcher: Watcher) -> None:
        self.limit_s = limit_s
        """May be changed at any time; it counts for a host from its next sign of life on."""
        self._clock = clock
        self._watcher = watcher
        self._pulses: dict[str, _Pulse] = {}
        self._newest: tuple[str, float] | None = None
        """Who was heard last, and when."""
        self._another: tuple[str, float] | None = None
        """The newest sign of life of any other host than that one."""
        self._alone_since: float | None = None

    def expect(self, host: str, limit_s: float) -> None:
        """Count on hearing from ``host`` within ``limit_s``, though nothing came from it yet."""
        pulse = self._pulses[host] = _Pulse(self._clock.monotonic(), limit_s)
        self._look_in(limit_s, host, pulse)

    def heard(self, host: str) -> None:
        """``host`` gave a sign of life just now."""
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
        """Whether ``host`` was not heard for longer than the limit."""
        silent_s = self.silent_s(host)
        return silent_s is not None and silent_s > self.limit_s

    def silent_s(self, host: str) -> float | None:
        """For how long nothing came from ``host``; None if nothing ever did."""
        pulse = self._pulses.get(host)
        return None if pulse is None else self._clock.monotonic() - pulse.since

    def _contact(self, host: str, now: float) -> None:
        """Everybody has to find this lighthouse again before anybody can be judged."""
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
        """The one timer of a host: looks, then waits for as long as the host may still be silent."""
        if self._pulses[host] is not pulse or self._alone_since is not None:
            return
        now = self._clock.monotonic()
        if now - max(pulse.due, pulse.since + pulse.limit_s) > STALL_SHARE * pulse.limit_s and not pulse.excused:
            # This process did not run when it should have: what the host sent meanwhile is still unread.
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
        """How long ago any other host was heard; infinity if none ever was."""
        found = self._another if self._newest is not None and self._newest[0] == host else self._newest
        return now - found[1] if found is not None else float("inf")
