"""Measure times of this job for ``decide/job/loss_costs``, from reports and events.

Under ``--on-loss auto``, ``Loop`` passes it every report and event, and asks for the figures at a loss.
"""

from __future__ import annotations

from collections.abc import Mapping

from craft.decide.job import loss_costs
from craft.decide.job.state import JobState
from craft.decide.policies.policy import subjects
from craft.protocol.events import AnyEvent, HostLost, TimesMeasured, WorkerFailed, WorkerJoined, WorkerLost
from craft.protocol.messages import HostReport, WorkerReport

LOSSES = (WorkerLost, WorkerFailed, HostLost)


class Timings:
    """Owned by the loop."""

    def __init__(self, times: TimesMeasured | None = None) -> None:
        """``times``: the measurements of an earlier lighthouse."""
        self._book = loss_costs.known(times)
        self._restore = 0

    def reported(self, report: HostReport, state: JobState, now: float) -> None:
        """Take in the progress of a host's workers."""
        self._forget_slots(state)
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

    def observed(self, event: AnyEvent, state: JobState, now: float) -> None:
        """Take in an event; ``state`` is the one before it."""
        self._forget_slots(state)
        if isinstance(event, WorkerJoined):
            self._book = loss_costs.arrived(self._book, event.member.worker_id)
        elif isinstance(event, LOSSES) and state.generation is not None:
            for worker_id in subjects(state, event):
                view = state.view(worker_id)
                if view is not None and view.standing in ("waiting", "member"):
                    self._book = loss_costs.lost(self._book, worker_id, state.spares, now)

    def _forget_slots(self, state: JobState) -> None:
        """After a restore, or if free slots stay empty, no arrival replaces a certain worker."""
        restore = state.restoration.number if state.restoration is not None else 0
        if state.generation is None or not state.replacing or restore != self._restore:
            self._book = loss_costs.left_empty(self._book)
        self._restore = restore

    def figures(self, reports: Mapping[str, WorkerReport], state: JobState) -> TimesMeasured:
        """Return the figures for the decision about a loss."""
        living = [report for worker_id in state.members if (report := reports.get(worker_id)) is not None]
        first = max(living, key=lambda report: report.step, default=None)
        return loss_costs.measured(
            self._book,
            step=first.step if first is not None else 0,
            total_steps=first.total_steps if first is not None else None,
            microbatches=first.microbatches if first is not None else None,
        )
