"""A job that loses units and everything at random moments, played through event by event: what planning's formulas are held to.

It knows nothing of them: units fail one by one, spares and replacements come when they come, work that no complete
checkpoint has is lost when nobody is left.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import NamedTuple

_MOMENT_S = 1e-3
"""No time is measured more exactly: after years of seconds, numbers are not."""


class Answer(NamedTuple):
    """How a job answers a loss, and how it is saved from the loss of everything."""

    pause_s: float = 0.0
    join_s: float = 0.0
    replace_s: float = 0.0
    spares: int = 0
    speed: Callable[[int], float] = lambda missing: 1.0
    interval_s: float = 1e18
    """Work from checkpoint to checkpoint."""
    stall_s: float = 0.0
    write_s: float = 0.0
    restart_s: float = 0.0


class Played(NamedTuple):
    goodput: float
    ends: int
    """How often nobody was left, outages not counted."""


class Job:
    """``rate``: losses per second with all units there. ``outage_rate``: of everything at once."""

    def __init__(self, num_units: int, rate: float, outage_rate: float, answer: Answer, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        self._units, self._rate, self._outage_rate = num_units, rate, outage_rate
        self._answer = answer
        self.now = self.work = 0.0
        self.ends = 0
        self._begin()

    def _begin(self) -> None:
        self._events: list[tuple[float, str]] = []
        self._uncovered = self._joining = 0
        self._idle = self._answer.spares
        self._resumes = self.now
        self._saved = self._copied = self.work
        self._writing: list[tuple[float, float]] = []

    def play(self, until_s: float) -> Played:
        while self.now < until_s:
            working = self._units - self._uncovered - self._joining
            loss = self._after(self._rate * working / self._units)
            outage = self._after(self._outage_rate)
            coming = self._events[0][0] if self._events else float("inf")
            moment = min(loss, outage, coming)
            self._work_until(moment)
            if moment == coming:
                self._come(heapq.heappop(self._events)[1])
            elif moment == outage:
                self._end()
            elif working == 1:
                self.ends += 1
                self._end()
            else:
                self._lose()
        return Played(self.work / self.now, self.ends)

    def _after(self, rate: float) -> float:
        """Drawn anew after every event: what has not come yet is as far away as ever."""
        return self.now + self._draw.expovariate(rate) if rate else float("inf")

    def _work_until(self, moment: float) -> None:
        speed = self._answer.speed(self._uncovered + self._joining)
        while self.now < moment:
            if self.now < self._resumes:
                self.now = min(moment, self._resumes)
                continue
            todo = self._copied + self._answer.interval_s - self.work
            if todo <= _MOMENT_S:
                self._copied = self.work
                self._resumes = self.now + self._answer.stall_s
                self._writing.append((self._resumes + self._answer.write_s, self.work))
                continue
            end = min(moment, self.now + todo / speed) if speed else moment
            self.work += (end - self.now) * speed
            self.now = end
        self._saved = max([self._saved, *(work for done, work in self._writing if done <= self.now)])
        self._writing = [each for each in self._writing if each[0] > self.now]

    def _lose(self) -> None:
        self._resumes = max(self._resumes, self.now + self._answer.pause_s)
        heapq.heappush(self._events, (self.now + self._answer.replace_s, "back"))
        if self._idle:
            self._idle -= 1
            self._joining += 1
            heapq.heappush(self._events, (self.now + self._answer.join_s, "joined"))
        else:
            self._uncovered += 1

    def _come(self, what: str) -> None:
        if what == "joined":
            self._joining -= 1
        elif self._uncovered:
            self._uncovered -= 1
        else:
            self._idle += 1

    def _end(self) -> None:
        """Nobody is left. A failure while the job begins again makes it begin once more."""
        self.work = self._saved
        began = self.now
        while (again := self._draw.expovariate(self._rate + self._outage_rate)) < self._answer.restart_s:
            began += again
        self.now = began + self._answer.restart_s
        self._begin()
