"""Measures how long things take in this job: feeds ``decide.costs`` with what reports and events say, and when.

``Loop`` shows it every report and every event, where a policy chooses by cost; at a loss it asks for the figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from craft.decide.job import loss_costs
from craft.decide.job.state import JobState
from craft.decide.policies.policy import subjects
from craft.protocol.events import AnyEvent, HostLost, TimesMeasured, WorkerFailed, WorkerJoined, WorkerLost
from craft.protocol.messages import HostReport, WorkerReport

LOSSES = (WorkerLost, WorkerFailed, HostLost)


def times_in(lines: Iterable[dict[str, Any]]) -> TimesMeasured | None:
    """Return the last figures that a journal holds."""
    found = [line for line in lines if line.get("event") == "TimesMeasured"]
    return msgspec.convert(found[-1], TimesMeasured, strict=False) if found else None


class Timings:
    """Owned by the loop."""

    def __init__(self, times: TimesMeasured | None = None) -> None:
        """``times``: what an earlier lighthouse had measured."""
        self._book = loss_costs.known(times)
        self._beginning = 0

    def see(self, report: HostReport, state: JobState, now: float) -> None:
        """A host says how far its workers are."""
        self._let_go(state)
        current = state.generation
        if current is None:
            return
        for worker in report.workers:
            if worker.step:
                self._book = loss_costs.committed(self._book, worker.member.worker_id, now)
            if worker.generation == current.number:
                self._book = loss_costs.stepped(
                    self._book,
                    generation=current.number,
                    members=len(current.members),
                    step=worker.step,
                    step_s=worker.step_s,
                )

    def hear(self, event: AnyEvent, state: JobState, now: float) -> None:
        """Something happened; ``state`` does not know of it yet."""
        self._let_go(state)
        if isinstance(event, WorkerJoined):
            self._book = loss_costs.arrived(self._book, event.member.worker_id)
        elif isinstance(event, LOSSES) and state.generation is not None:
            for worker_id in subjects(state, event):
                view = state.view(worker_id)
                if view is not None and view.standing in ("waiting", "member"):
                    self._book = loss_costs.lost(self._book, worker_id, state.spares, now)

    def _let_go(self, state: JobState) -> None:
        """Where all begin together, or free slots are left so, nobody comes in the place of a certain one."""
        beginning = state.restoration.number if state.restoration is not None else 0
        if state.generation is None or not state.replacing or beginning != self._beginning:
            self._book = loss_costs.left_empty(self._book)
        self._beginning = beginning

    def figures(self, reports: Mapping[str, WorkerReport], state: JobState) -> TimesMeasured:
        """All that is known now, for whoever is to decide about a loss."""
        living = [report for worker_id in state.members if (report := reports.get(worker_id)) is not None]
        first = max(living, key=lambda report: report.step, default=None)
        return loss_costs.measured(
            self._book,
            step=first.step if first is not None else 0,
            total_steps=first.total_steps if first is not None else None,
            microbatches=first.microbatches if first is not None else None,
        )
