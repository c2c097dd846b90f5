"""What is known of a job after an event: ``observe``. A repeated or late event changes nothing."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from craft.decide import roster
from craft.decide.membership import GONE, JobState, Standing, WorkerView
from craft.decide.restoration import reached
from craft.protocol.events import (
    AnyEvent,
    CheckpointRestored,
    CheckpointWritten,
    DrainRequested,
    ExchangeBroken,
    FaultInjected,
    GenerationEntered,
    HoldExpired,
    HostLost,
    ReplacementsEnded,
    RolledBack,
    TimesMeasured,
    WorkerEnded,
    WorkerFailed,
    WorkerFinished,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)
from craft.protocol.injections import BY_LIGHTHOUSE, KEPT
from craft.protocol.membership import Generation, Member

_KEPT_GONE = 1000
"""So many workers that are gone are remembered: a report of one that nobody knows would make it a new one."""
_KEPT_FAILURES = 100


def observe(state: JobState, event: AnyEvent) -> JobState:
    """Return what is known after ``event``; a repeated or late event changes nothing."""
    if isinstance(event, WorkerJoined):
        return _joined(state, event.member)
    if isinstance(event, WorkerLost):
        state = reached(state, event.worker_id, event.step)
        return gone(state, event.worker_id, "lost", ended=event.source == "agent")
    if isinstance(event, WorkerFailed):
        state = reached(state, event.worker_id, event.step or 0)
        state = gone(state, event.worker_id, "lost")
        failures = (*state.failures, event)[-_KEPT_FAILURES:]
        return state if event in state.failures else replace(state, failures=failures)
    if isinstance(event, WorkerFinished):
        state = reached(state, event.worker_id, event.step)
        # Of a job that makes room, its end may be known before its word that it left.
        left = state.preempting is not None and not event.complete
        state = gone(state, event.worker_id, "left" if left else "finished")
        return changed(state, event.worker_id, digest=event.digest) if event.complete else state
    if isinstance(event, WorkerLeft):
        return _left(reached(state, event.worker_id, event.step), event.worker_id)
    if isinstance(event, WorkerEnded):
        return changed(state, event.worker_id, ended=True)
    if isinstance(event, HostLost):
        for view in state.having("waiting", "member"):
            if view.member.host == event.host:
                state = reached(state, view.member.worker_id, event.step)
                state = gone(state, view.member.worker_id, "lost")
        return state
    if isinstance(event, DrainRequested):
        for worker_id in to_drain(state, event):
            state = changed(state, worker_id, draining=event.reason)
        return state
    if isinstance(event, ReplacementsEnded):
        return replace(state, unreplaced=tuple(sorted({event.host: event.reason, **dict(state.unreplaced)}.items())))
    if isinstance(event, FaultInjected) and event.fault not in BY_LIGHTHOUSE:
        return replace(state, injections=(*state.injections, event)[-KEPT:])
    if isinstance(event, CheckpointWritten):
        newest = max(filter(None, (state.checkpoint, event)), key=lambda each: (each.branch, each.step))
        return replace(state, checkpoint=newest, branch=max(state.branch, event.branch))
    if isinstance(event, CheckpointRestored):
        return replace(state, begun_from=event, branch=max(state.branch, event.branch))
    if isinstance(event, RolledBack):
        return replace(state, branch=max(state.branch, event.branch))
    if isinstance(event, TimesMeasured):
        return replace(state, times=event)
    if isinstance(event, ExchangeBroken):
        return _broken(state, event)
    if isinstance(event, GenerationEntered):
        return _entered(state, event.worker_id, event.generation)
    if isinstance(event, HoldExpired):
        return replace(state, holding=0) if state.holding == event.generation else state
    return state


def to_drain(state: JobState, event: DrainRequested) -> tuple[str, ...]:
    """The living workers that ``event`` is about, and that were not to leave already."""
    return tuple(view.member.worker_id for view in _subjects(state, event) if view.draining is None)


def drains(state: JobState, event: DrainRequested, now: float) -> bool:
    """Whether a wish that workers leave changes anything: some were to stay, or have less time now."""
    if to_drain(state, event):
        return True
    return event.deadline_s is not None and any(
        view.leave_by is None or now + event.deadline_s < view.leave_by for view in _subjects(state, event)
    )


def _subjects(state: JobState, event: DrainRequested) -> tuple[WorkerView, ...]:
    return tuple(
        view
        for view in state.having("waiting", "member")
        if view.member.worker_id == event.worker_id or view.member.host == event.host
    )


def preempts(state: JobState, deadline: float | None) -> bool:
    """Whether a wish that the job makes room until ``deadline`` changes anything: it is the first, or has less time."""
    if state.stopping is not None or state.winding_down is not None:
        return False
    current = state.preempting
    if current is None or deadline is None:
        return current is None
    return current.deadline is None or deadline < current.deadline


def _joined(state: JobState, member: Member) -> JobState:
    if state.view(member.worker_id) is not None:
        return state
    former = state.having(*GONE)
    workers = state.workers
    if len(former) > _KEPT_GONE:
        forgotten = frozenset(view.member.worker_id for view in former[: len(former) - _KEPT_GONE] if view.ended)
        workers = tuple(view for view in workers if view.member.worker_id not in forgotten)
    return replace(state, workers=(*workers, WorkerView(member=member, fresh=True)))


def changed(state: JobState, worker_id: str, **changes: Any) -> JobState:
    view = state.view(worker_id)
    return state if view is None else replace(state, workers=roster.replaced(state.workers, replace(view, **changes)))


def gone(state: JobState, worker_id: str, standing: Standing, ended: bool = False) -> JobState:
    view = state.view(worker_id)
    if view is None:
        # It ended before it joined. Remember it, so that the first generation does not wait for it for ever.
        unknown = WorkerView(member=Member(worker_id=worker_id), standing=standing, ended=ended)
        return replace(state, workers=(*state.workers, unknown), absent=state.absent + _counts(state))
    if view.standing in GONE:
        return changed(state, worker_id, ended=True) if ended and not view.ended else state
    if view.standing == "waiting" and state.generation is None:
        state = replace(state, absent=state.absent + _counts(state))
    return changed(state, worker_id, standing=standing, ended=ended)


def _counts(state: JobState) -> bool:
    """Whether one that does not come is missed for good: where a job begins again, others come in its place."""
    return not state.restoring


def _left(state: JobState, worker_id: str) -> JobState:
    upcoming = state.upcoming
    if upcoming is not None and upcoming.rank_of(worker_id) is None and state.preempting is None:
        # It left because all were ready for this generation: they enter it at the same step boundary.
        state = adopt(replace(state, upcoming=None), upcoming)
    return gone(state, worker_id, "left")


def _broken(state: JobState, event: ExchangeBroken) -> JobState:
    known = {each.number for each in (state.generation, state.upcoming) if each is not None}
    if event.generation not in known:
        return state
    state = replace(state, broken=tuple(sorted({*(set(state.broken) & known), event.generation})))
    if state.generation is None or event.generation != state.generation.number:
        return state
    complaints = {*state.complaints, *((event.worker_id, peer) for peer in event.unreachable)}
    return replace(state, complaints=tuple(sorted(complaints)))


def _entered(state: JobState, worker_id: str, generation: int) -> JobState:
    view = state.view(worker_id)
    if view is not None and generation > view.entered:
        state = changed(state, worker_id, entered=generation)
    if generation > state.highest:
        state = replace(state, highest=generation)
    if state.upcoming is not None and state.upcoming.number == generation:
        # All enter it at the same step boundary, so one that has is enough to know.
        state = adopt(replace(state, upcoming=None), state.upcoming)
    if state.recovering and state.generation is not None and state.generation.number == generation:
        views = state.having("member")
        state = replace(state, recovering=any(view.entered < generation for view in views))
    return state


def adopt(state: JobState, generation: Generation) -> JobState:
    inside = frozenset(generation.worker_ids)

    def standing(view: WorkerView) -> Standing:
        if view.member.worker_id in inside:
            return "member" if view.standing == "waiting" else view.standing
        # Only those who are to leave are left out of a generation alive.
        return "left" if view.standing == "member" else view.standing

    workers = tuple(
        view if (now := standing(view)) == view.standing else replace(view, standing=now) for view in state.workers
    )
    return replace(
        state,
        workers=workers,
        generation=generation,
        highest=max(state.highest, generation.number),
        complaints=(),
        probing=0,
        holding=0,
        former=None,
    )
