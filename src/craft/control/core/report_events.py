"""Turn reports, which are level-triggered, into events, each of them once.

``Loop`` handles each event of a report before it asks for the next one, so that a later event is judged by the state
that the earlier one led to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from craft.control.core.worker_index import WorkerIndex
from craft.control.replay.already_journaled import AlreadyJournaled, identity
from craft.decide.job.last_copy import STOPPED
from craft.decide.job.observe import preempts
from craft.decide.job.state import JobState
from craft.decide.policies.detected import is_elsewhere, waits
from craft.protocol import events
from craft.protocol.messages import Broken, Exited, HostReport, PreemptionOrder, WorkerReport, ending

LEFT_EARLY = "the script left before its end, with exit code 0, as by os._exit(0)"
_ANSWERED = (events.StateDiverged, events.StateGone)
"""Of the values journaled once, these decide how the job goes on."""


@dataclass
class WorkerHistory:
    """What one worker's reports led to so far."""

    report: WorkerReport
    host: str
    joined: bool = False
    generation: int = 0
    broken: Broken | None = None
    """Its last report of a broken exchange."""
    overdue: events.WorkerOverdue | None = None
    """The last finding about it."""
    failed: bool = False
    left: bool = False
    exited: bool = False
    loop: int = 0
    after_loop: bool = False
    script_ended: bool = False


class ReportEvents:
    """Remembers the reports of each worker; ``state`` returns the current job state."""

    def __init__(self, state: Callable[[], JobState], journaled: AlreadyJournaled) -> None:
        self._state = state
        self._journaled = journaled
        self.seen: dict[str, WorkerHistory] = {}
        self.index = WorkerIndex(state)
        self._values: set[object] = set()
        """Identities of values that are journaled once, however often they are reported."""
        self._exited: set[str] = set()
        self._starting: dict[str, set[str]] = {}
        """Workers that have neither joined nor ended, by host; used for every report."""
        self._coming: dict[str, int] = {}
        """How many workers of a host are on the way, by its agent."""

    def of(self, report: HostReport) -> Iterator[events.AnyEvent]:
        """Yield what is new in ``report``. Entries come before losses: a worker may enter a generation and then die."""
        # Workers of a draining host do not come to stay.
        self._coming[report.host] = 0 if report.draining is not None else report.starting
        reports = [_normal(worker, report.host) for worker in report.workers]
        ended = frozenset(exited.worker_id for exited in report.exited)
        for worker in reports:
            # First: the last worker to leave a preempted job reports its checkpoint along with its end.
            yield from self._once(worker.notes)
        for worker in reports:
            yield from self._arrived(worker, report.host, ended)
        for worker in reports:
            # Before its failure: divergence is the cause, and gives the reason for the end.
            yield from self._values_of(worker)
            yield from self._failed(worker)
        # Before losses: the answer to one depends on whether a replacement can come.
        yield from self._gives_up(report)
        for exited in report.exited:
            yield from self._exits(exited)
        yield from self._forgotten(report)
        for worker in reports:
            yield from self._broken(worker)
            yield from self._overdue(worker)
        yield from self._of_host(report)

    def starting(self, host: str) -> frozenset[str]:
        """Return the workers of ``host`` that were reported and have neither joined nor ended."""
        return frozenset(each for each in self._starting.get(host, ()) if not self.index.gone(each))

    @property
    def any_coming(self) -> bool:
        """Whether an agent reports that a worker of its host is on the way."""
        return any(self._coming.values())

    def silenced(self, host: str) -> None:
        """Forget the workers on the way of a host that is silent."""
        self._coming.pop(host, None)

    def step_of(self, worker_id: str) -> int | None:
        """Return the committed steps in a worker's last report; None without one."""
        seen = self.seen.get(worker_id)
        return None if seen is None else seen.report.step

    @property
    def checkpoints(self) -> bool:
        """Whether a worker takes checkpoints."""
        return any(seen.report.checkpoints for seen in self.seen.values())

    def _arrived(self, report: WorkerReport, host: str, ended: Collection[str]) -> Iterator[events.AnyEvent]:
        worker_id = report.member.worker_id
        seen = self.seen.get(worker_id)
        if seen is None:
            seen = self.seen[worker_id] = WorkerHistory(report=report, host=host)
            self._starting.setdefault(host, set()).add(worker_id)
        elif seen.host != host and worker_id in self._starting.get(seen.host, ()):
            self._starting[seen.host].discard(worker_id)
            self._starting.setdefault(host, set()).add(worker_id)
        seen.report, seen.host = report, host
        if report.joined and not seen.joined:
            seen.joined = True
            self._starting.get(host, set()).discard(worker_id)
            # A worker that has ended meanwhile takes no slot.
            if self.index.view(worker_id) is None and worker_id not in ended:
                yield events.WorkerJoined(member=report.member, pid=report.pid)
        if report.generation > seen.generation:
            seen.generation = report.generation
            if self.index.lives(worker_id):
                yield events.GenerationEntered(
                    worker_id=worker_id, generation=report.generation, progress=report.progress, behind=report.behind
                )
        elif not report.behind and self.index.is_behind(worker_id):
            yield events.WorkerCaughtUp(worker_id=worker_id)
        yield from self._after_loop(report, seen)
        if report.left and not seen.left:
            seen.left = True
            if not self.index.is_old_news(worker_id):
                yield events.WorkerLeft(worker_id=worker_id, step=report.step)
        if report.complete and self.index.lives(worker_id):
            # No generation may wait for it: its script may run on for long.
            yield events.WorkerFinished(
                worker_id=worker_id, step=report.step, digest=report.digest, total_steps=report.total_steps
            )

    def _after_loop(self, report: WorkerReport, seen: WorkerHistory) -> Iterator[events.AnyEvent]:
        """Yield the beginnings and ends of a worker's training loops and the end of its script."""
        worker_id = report.member.worker_id
        if not self.index.lives(worker_id):
            return
        if report.loop > max(seen.loop, 1):
            yield events.LoopBegun(worker_id=worker_id, loop=report.loop)
        if report.after_loop and (report.loop > seen.loop or not seen.after_loop):
            yield events.LoopEnded(worker_id=worker_id, step=report.step, loop=report.loop)
        if report.script_ended and not seen.script_ended:
            yield events.ScriptEnded(worker_id=worker_id)
        seen.loop, seen.after_loop, seen.script_ended = report.loop, report.after_loop, report.script_ended

    def _failed(self, report: WorkerReport) -> Iterator[events.AnyEvent]:
        seen = self.seen[report.member.worker_id]
        if report.failed is None or seen.failed:
            return
        seen.failed = True
        # A fenced worker may fail because it is fenced; for one that just ended, this is the late reason.
        if seen.exited or not self.index.gone(report.member.worker_id):
            yield report.failed

    def _exits(self, exited: Exited) -> Iterator[events.AnyEvent]:
        if exited.worker_id in self._exited:
            return
        self._exited.add(exited.worker_id)
        seen = self.seen.get(exited.worker_id)
        if seen is not None:
            seen.exited = True
            self._starting.get(seen.host, set()).discard(exited.worker_id)
        if self.index.gone(exited.worker_id) or (seen is not None and seen.failed):
            if self.index.may_run(exited.worker_id):
                yield events.WorkerEnded(worker_id=exited.worker_id)
            return
        if self._state().stopping is not None and (seen is None or not seen.joined):
            # It was still starting when the job ended, and its agent did not wait for it.
            return
        yield _ending(exited, seen, self._state())
        if self.index.may_run(exited.worker_id):
            # It left early, with exit code 0: it failed, and its process is gone.
            yield events.WorkerEnded(worker_id=exited.worker_id)

    def _forgotten(self, report: HostReport) -> Iterator[events.AnyEvent]:
        """Yield the loss of workers that their agent does not know: the agent was replaced, and they died with the old one."""
        expected = self.index.living(report.host)
        mentioned = {worker.member.worker_id for worker in report.workers}
        mentioned.update(exited.worker_id for exited in report.exited)
        for worker_id in sorted((expected | self.starting(report.host)) - mentioned):
            reason = "its agent does not know it any more"
            yield events.WorkerLost(worker_id=worker_id, reason=reason, step=self.step_of(worker_id))

    def _broken(self, report: WorkerReport) -> Iterator[events.AnyEvent]:
        worker_id, broken = report.member.worker_id, report.broken
        seen = self.seen[worker_id]
        if broken is None or broken == seen.broken:
            return
        seen.broken = broken
        if broken.generation in self.index.wanted and self.index.lives(worker_id):
            yield events.ExchangeBroken(
                worker_id=worker_id,
                generation=broken.generation,
                detail=broken.detail,
                unreachable=broken.unreachable,
                missed=broken.missed,
                progress=report.progress,
            )

    def _overdue(self, report: WorkerReport) -> Iterator[events.AnyEvent]:
        worker_id, found = report.member.worker_id, report.overdue
        if found is None and any(each.worker_id == worker_id for each in self._state().awaited):
            yield events.Answered(worker_id=worker_id)
        if found is None or not self.index.lives(worker_id):
            return
        others = [
            (other_id, other.report.phase)
            for other_id, other in self.seen.items()
            if other_id != worker_id and self.index.takes_part(other_id)
        ]
        found = replace(
            found,
            worker_id=worker_id,
            waiting=tuple(other_id for other_id, phase in others if waits(phase, found.phase)),
            elsewhere=tuple(other_id for other_id, phase in others if is_elsewhere(phase, found.phase)),
            stopped=tuple(other_id for other_id, phase in others if phase == STOPPED),
        )
        seen = self.seen[worker_id]
        if seen.overdue is None or identity(found) != identity(seen.overdue):
            seen.overdue = found
            yield found

    def _gives_up(self, report: HostReport) -> Iterator[events.AnyEvent]:
        ended = any(host == report.host for host, _ in self._state().unreplaced)
        if report.exhausted is not None and not ended:
            yield events.ReplacementsEnded(host=report.host, reason=report.exhausted)
        elif report.exhausted is None and ended:
            # Another agent runs there now, with its full number of restarts.
            yield events.ReplacementsResumed(host=report.host)

    def _of_host(self, report: HostReport) -> Iterator[events.AnyEvent]:
        if report.draining is not None and self.index.staying(report.host):
            yield events.DrainRequested(host=report.host, reason=report.draining, deadline_s=report.drain_deadline_s)
        wanted = report.preempting
        leaves = report.draining is not None and self.index.all_leave and not self.any_coming
        if wanted is None and leaves and self.checkpoints:
            # No host stays to go on with the state, so it is saved. The drains have the deadlines.
            wanted = PreemptionOrder(reason=f"every host is to leave: {report.draining}")
        if wanted is not None and preempts(self._state(), wanted.deadline):
            yield events.PreemptRequested(reason=wanted.reason, deadline=wanted.deadline)

    def _values_of(self, report: WorkerReport) -> Iterator[events.AnyEvent]:
        gone = events.StateGone(generation=report.state_gone) if report.state_gone else None
        yield from self._once((report.diverged, report.unequal, report.retried, gone))

    def _once(self, values: Iterable[events.AnyEvent | None]) -> Iterator[events.AnyEvent]:
        for value in values:
            if value is None or identity(value) in self._values:
                continue
            self._values.add(identity(value))
            if value not in self._journaled or isinstance(value, _ANSWERED):
                yield value


def _normal(report: WorkerReport, host: str) -> WorkerReport:
    """Set a report's host to its agent's, and the worker of its failure to itself."""
    member, failed = report.member, report.failed
    if member.host != host:
        report = replace(report, member=replace(member, host=host))
    if failed is not None and failed.worker_id != member.worker_id:
        report = replace(report, failed=replace(failed, worker_id=member.worker_id))
    return report


def _ending(exited: Exited, seen: WorkerHistory | None, state: JobState) -> events.AnyEvent:
    """Return what the end of a process means. Exit code 0 says nothing without an earlier report of the worker."""
    report = seen.report if seen is not None else None
    step = None if report is None else report.step
    if exited.signal is not None or exited.exit_code != 0:
        return events.WorkerLost(worker_id=exited.worker_id, reason=describe_exit(exited), time=exited.time, step=step)
    said = report is not None and (report.complete or report.left or report.script_ended)
    view = state.view(exited.worker_id)
    if said or state.ending or (view is not None and view.draining is not None):
        # It was asked to leave: its report of that may not have arrived.
        complete, digest = (report.complete, report.digest) if report is not None else (False, None)
        total = report.total_steps if report is not None and complete else None
        return events.WorkerFinished(
            worker_id=exited.worker_id, step=step or 0, digest=digest, complete=complete, total_steps=total
        )
    # Steps are reported with a delay: a worker in a generation may have committed more than is known.
    begun = report is not None and report.generation > 0
    late = report is not None and report.member.late
    return events.WorkerFailed(
        worker_id=exited.worker_id,
        error=LEFT_EARLY,
        traceback="",
        step=step if begun else None,
        late=late,
        time=exited.time,
    )


def describe_exit(exited: Exited) -> str:
    """Return how a process ended, in words."""
    if exited.signal is not None:
        return f"{ending(-exited.signal)} {exited.why}".rstrip()
    return "ended in an unknown way" if exited.exit_code is None else ending(exited.exit_code)
