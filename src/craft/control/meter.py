"""Measures how long things take in this job: feeds ``decide.costs`` with what reports and events say, and when.

``Loop`` shows it every report and every event, where a policy chooses by cost; at a loss it asks for the figures.
"""

from __future__ import annotations

from collections.abc import Mapping

from craft.decide import costs
from craft.decide.membership import JobState
from craft.protocol.events import AnyEvent, HostLost, TimesMeasured, WorkerFailed, WorkerJoined, WorkerLost
from craft.protocol.messages import HostReport, WorkerReport

LOSSES = (WorkerLost, WorkerFailed, HostLost)


class Meter:
    """Owned by the loop."""

    def __init__(self) -> None:
        self._book = costs.Book()

    def see(self, report: HostReport, state: JobState, now: float) -> None:
        """A host says how far its workers are."""
        current = state.generation
        if current is None:
            return
        for worker in report.workers:
            if worker.step:
                self._book = costs.committed(self._book, worker.member.worker_id, now)
            if worker.generation == current.number:
                self._book = costs.stepped(
                    self._book,
                    generation=current.number,
                    members=len(current.members),
                    step=worker.step,
                    step_s=worker.step_s,
                )

    def hear(self, event: AnyEvent, state: JobState, now: float) -> None:
        """Something happened."""
        if isinstance(event, WorkerJoined) and state.generation is not None:
            self._book = costs.arrived(self._book, event.member.worker_id, now)
        elif isinstance(event, LOSSES) and state.generation is not None:
            self._book = costs.lost(self._book, now)

    def figures(self, reports: Mapping[str, WorkerReport], state: JobState) -> TimesMeasured:
        """All that is known now, for whoever is to decide about a loss."""
        living = [report for worker_id in state.members if (report := reports.get(worker_id)) is not None]
        first = max(living, key=lambda report: report.step, default=None)
        return costs.measured(
            self._book,
            step=first.step if first is not None else 0,
            total_steps=first.total_steps if first is not None else None,
            microbatches=first.microbatches if first is not None else None,
        )
