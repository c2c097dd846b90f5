"""The journal of a story, with times: whether a job of a story ever stands still though nothing is under way.

Some time passes after every block of a story. Members commit in it, unless one of them is gone, hangs, or their exchange is
broken. What a story tells comes from outside, so that each block counts as a fault: ``liveness`` counts from there.
"""

from __future__ import annotations

from typing import Any

import msgspec

from craft.decide.job.state import JobState
from craft.protocol.actions import DeclareHostLost, DeclareLost, Reconfigure
from craft.protocol.events import WorkerOverdue
from craft.testing.liveness import judge

_PASSES_S = 9.0
_SOON_S = 1.0
"""Where what was decided has an end that the next block tells of: a short timer, a probe, a worker that is declared lost."""


class Chronicle:
    """Written by the teller of a story. A story may have several jobs, one after the other."""

    def __init__(self) -> None:
        self._violations: list[str] = []
        self._clear()

    def _clear(self) -> None:
        self._now = 0.0
        self._journal: list[dict[str, Any]] = []
        self._commits: list[tuple[float, int]] = []
        self._hanging: set[str] = set()
        self._declared = False

    def begin(self) -> None:
        """Another job."""
        if self._journal:
            self._journal.append({"time": self._now, "kind": "event", "event": "StoryEnded"})
            self._violations += judge(self._journal, self._commits, over=False).violations
        self._clear()

    def write(self, kind: str, value: msgspec.Struct) -> None:
        """What happened, or was decided, now."""
        line = msgspec.to_builtins(value)
        line.pop("time", None)
        self._journal.append({**line, "time": self._now, "kind": kind})
        # One that is in the exchange, or in a call, waits itself.
        if isinstance(value, WorkerOverdue) and value.waiting and value.phase not in ("exchanging", "calling"):
            self._hanging.add(value.worker_id)
        elif isinstance(value, Reconfigure):
            self._hanging.clear()
        self._declared = isinstance(value, DeclareLost | DeclareHostLost)

    def wait(self, state: JobState) -> None:
        """The block is over: time passes, and the members commit if they can."""
        if not self._journal:
            return
        self._journal.append({"time": self._now, "kind": "event", "event": "FaultInjected", "fault": "story"})
        broken = state.generation is not None and state.generation.number in state.broken
        until = self._now + (_SOON_S if broken or state.probing or state.recovering or self._declared else _PASSES_S)
        while self._now < until:
            if not broken and self._is_whole(state):
                self._commits.append((self._now, len(self._commits)))
            self._now += _SOON_S

    def _is_whole(self, state: JobState) -> bool:
        members = set(state.generation.worker_ids) if state.generation is not None else set()
        lost = {view.member.worker_id for view in state.having("lost")}
        return bool(members) and not members & (lost | self._hanging)

    def violations(self) -> list[str]:
        """Where a job stood still for a reason that its journal does not give."""
        self.begin()
        return self._violations
