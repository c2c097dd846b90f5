"""Take events into the job state. A repeated or late event changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from craft.decide.job.restoration import reached
from craft.decide.job.roster import Roster, Standing, WorkerView
from craft.decide.job.state import GONE, JobState, LostAfterLoop
from craft.protocol import events
from craft.protocol.membership import Generation, Member
from craft.protocol.values.injections import BY_LIGHTHOUSE, KEPT

_KEPT_GONE = 1000
"""Keep this many workers that are gone: a late report of a forgotten one would make it a new worker."""
_KEPT_FAILURES = 100
PEERS = "peers"
"""The source of a loss declared because of the other members' complaints."""


def observe(state: JobState, event: events.AnyEvent) -> JobState:
    """Return the state after ``event``; a repeated or late event changes nothing."""
    observed = _OBSERVERS.get(type(event))
    return state if observed is None else observed(state, event)


def _lost(state: JobState, event: events.WorkerLost) -> JobState:
    state = _note_loss_after_loop(reached(state, event.worker_id, event.step), event.worker_id, event.reason)
    view = state.view(event.worker_id)
    if event.source == PEERS and view is not None and view.standing not in GONE:
        state = replace(state, blamed=state.blamed + 1)
    return gone(state, event.worker_id, "lost", ended=event.source == "agent")


def _failed(state: JobState, event: events.WorkerFailed) -> JobState:
    state = _note_loss_after_loop(reached(state, event.worker_id, event.step or 0), event.worker_id, event.error)
    state = gone(state, event.worker_id, "lost")
    return state if event in state.failures else replace(state, failures=(*state.failures, event)[-_KEPT_FAILURES:])


def _finished(state: JobState, event: events.WorkerFinished) -> JobState:
    state = reached(state, event.worker_id, event.step)
    # When a job is preempted, a worker's end may be known before its report that it left.
    left = state.preempting is not None and not event.complete
    early = _is_after_loop(state, event.worker_id) or _is_draining(state, event.worker_id)
    if not (left or event.complete) and early:
        # Ended by os._exit(0) or the like: the script may not be done.
        state = _note_loss_after_loop(state, event.worker_id, "ended before the end of its script")
        return gone(state, event.worker_id, "lost", ended=True)
    state = gone(state, event.worker_id, "left" if left else "finished")
    if not event.complete:
        return state
    cut = None if event.total_steps is None or event.step >= event.total_steps else (event.step, event.total_steps)
    return changed(state, event.worker_id, digest=event.digest, cut=cut)


def _host_lost(state: JobState, event: events.HostLost) -> JobState:
    for view in state.having("waiting", "member"):
        if view.member.host == event.host:
            state = reached(state, view.member.worker_id, event.step)
            state = _note_loss_after_loop(state, view.member.worker_id, event.reason, replaceable=False)
            state = gone(state, view.member.worker_id, "lost")
    known = tuple(each for each in state.moving if state.host_of(each[0]) != event.host)
    return _answered(replace(state, moving=known), None, event.host)


def _loop_begun(state: JobState, event: events.LoopBegun) -> JobState:
    state = changed(state, event.worker_id, after_loop=False)
    return replace(state, loop=event.loop, owed=()) if event.loop > state.loop else state


def _drain_requested(state: JobState, event: events.DrainRequested) -> JobState:
    for worker_id in to_drain(state, event):
        state = changed(state, worker_id, draining=event.reason)
    return state


def _replacements_ended(state: JobState, event: events.ReplacementsEnded) -> JobState:
    return replace(state, unreplaced=tuple(sorted({event.host: event.reason, **dict(state.unreplaced)}.items())))


def _replacements_resumed(state: JobState, event: events.ReplacementsResumed) -> JobState:
    return replace(state, unreplaced=tuple(each for each in state.unreplaced if each[0] != event.host))


def _injected(state: JobState, event: events.FaultInjected) -> JobState:
    if event.fault in BY_LIGHTHOUSE:
        return state
    return replace(state, injections=(*state.injections, event)[-KEPT:])


def _checkpoint_written(state: JobState, event: events.CheckpointWritten) -> JobState:
    newest = max(filter(None, (state.checkpoint, event)), key=lambda each: (each.branch, each.step))
    return replace(state, checkpoint=newest, branch=max(state.branch, event.branch))


def _answered(state: JobState, worker_id: str | None, host: str | None) -> JobState:
    others = tuple(each for each in state.awaited if (each.worker_id, each.host) != (worker_id, host))
    return state if others == state.awaited else replace(state, awaited=others)


def to_drain(state: JobState, event: events.DrainRequested) -> tuple[str, ...]:
    """Return the live workers that ``event`` names and that are not draining yet."""
    return tuple(view.member.worker_id for view in _subjects(state, event) if view.draining is None)


def drains(state: JobState, event: events.DrainRequested, now: float) -> bool:
    """Return whether a drain request changes anything: some are not draining yet, or get an earlier deadline."""
    if to_drain(state, event):
        return True
    return event.deadline_s is not None and any(
        view.leave_by is None or now + event.deadline_s < view.leave_by for view in _subjects(state, event)
    )


def _subjects(state: JobState, event: events.DrainRequested) -> tuple[WorkerView, ...]:
    return tuple(
        view
        for view in state.having("waiting", "member")
        if view.member.worker_id == event.worker_id or view.member.host == event.host
    )


def preempts(state: JobState, deadline: float | None) -> bool:
    """Return whether a preemption until ``deadline`` changes anything: it is the first, or has an earlier deadline."""
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
    workers = state.roster
    if len(former) > _KEPT_GONE:
        forgotten = frozenset(view.member.worker_id for view in former[: len(former) - _KEPT_GONE] if view.ended)
        if forgotten:
            workers = Roster(view for view in workers if view.member.worker_id not in forgotten)
    state = _moved(state, member)
    return replace(state, workers=workers.with_appended(WorkerView(member=member, fresh=True)))


def _moved(state: JobState, member: Member) -> JobState:
    """Forget the move of a spare that is there again: it has the place of the one that ended."""
    if not state.moving:
        return state
    place = (member.host, member.local_rank)
    places = {view.member.worker_id: (view.member.host, view.member.local_rank) for view in state.having("left")}
    return replace(state, moving=tuple(each for each in state.moving if places.get(each[0], place) != place))


def changed(state: JobState, worker_id: str, **changes: Any) -> JobState:
    view = state.view(worker_id)
    return state if view is None else replace(state, workers=state.roster.with_view(replace(view, **changes)))


def gone(state: JobState, worker_id: str, standing: Standing, ended: bool = False) -> JobState:
    view = state.view(worker_id)
    if view is None:
        # It ended before it joined. Remember it: the first generation must not wait for it.
        # Without a host: a host counts as able to start replacements.
        unknown = WorkerView(member=Member(worker_id=worker_id, host=""), standing=standing, ended=ended)
        # It may be a spare that was started again: nothing waits for that one any longer.
        state = replace(state, moving=())
        return _absent(replace(state, workers=state.roster.with_appended(unknown)), standing)
    state = _answered(state, worker_id, None)
    if view.standing in GONE:
        return changed(state, worker_id, ended=True) if ended and not view.ended else state
    if view.standing == "waiting" and state.generation is None:
        state = _absent(state, standing)
    return changed(state, worker_id, standing=standing, ended=ended)


def _absent(state: JobState, standing: Standing) -> JobState:
    """Count a worker that the next generation expected and that will not join."""
    # No replacement is started for a worker that left: the job does not wait for it again.
    left = standing == "left" and state.generation is None
    return replace(state, absent=state.absent + _counts(state), left_before=state.left_before + left)


def _is_draining(state: JobState, worker_id: str) -> bool:
    view = state.view(worker_id)
    return view is not None and view.draining is not None


def _is_after_loop(state: JobState, worker_id: str) -> bool:
    """Return whether a member's loop is over and its script still runs."""
    view = state.view(worker_id)
    return view is not None and view.standing == "member" and view.after_loop and not view.script_ended


def _note_loss_after_loop(state: JobState, worker_id: str, reason: str, replaceable: bool = True) -> JobState:
    """Record that a worker was lost after its loop: another one has to run the code there."""
    if not _is_after_loop(state, worker_id) or state.generation is None:
        return state
    member = next((each for each in state.generation.members if each.worker_id == worker_id), None)
    if member is None or any(each.generation < member.since for each in state.owed):
        # It was the replacement for another one, whose code is still to be run.
        return state
    owed = LostAfterLoop(
        worker_id=worker_id,
        host=member.host,
        reason=reason,
        generation=state.generation.number,
        replaceable=replaceable,
    )
    return replace(state, owed=(*state.owed, owed))


def _counts(state: JobState) -> bool:
    """Return whether a missing worker stays missing: after a restore, replacements come."""
    return not state.restoring


def _left(state: JobState, worker_id: str) -> JobState:
    upcoming = state.upcoming
    # Not so for a spare, which leaves at once.
    was_member = state.generation is not None and state.generation.rank_of(worker_id) is not None
    if upcoming is not None and was_member and upcoming.rank_of(worker_id) is None and state.preempting is None:
        # It left because all were ready for this generation, which they enter at the same step boundary.
        state = adopt(replace(state, upcoming=None), upcoming)
    return gone(state, worker_id, "left")


def _broken(state: JobState, event: events.ExchangeBroken) -> JobState:
    known = {each.number for each in (state.generation, state.upcoming) if each is not None}
    if event.generation not in known:
        return state
    first = event.generation not in state.broken
    state = replace(state, broken=tuple(sorted({*(set(state.broken) & known), event.generation})))
    if state.generation is None or event.generation != state.generation.number:
        return state
    complaints = {*state.complaints, *((event.worker_id, peer) for peer in event.unreachable)}
    # The cause of an earlier break may be over: only the newest generation's reports count.
    before = () if first and event.missed else state.missed
    missed = {*before, *((event.worker_id, peer) for peer in event.missed)}
    return replace(state, complaints=tuple(sorted(complaints)), missed=tuple(sorted(missed)))


def _advanced(state: JobState, progress: tuple[int, ...]) -> JobState:
    """Reset the retry counters if a member got further than any before."""
    if progress <= state.progress:
        return state
    return replace(state, progress=progress, retries=0, missed=(), blamed=0)


def _generation_entered(state: JobState, event: events.GenerationEntered) -> JobState:
    worker_id, generation = event.worker_id, event.generation
    state = _advanced(changed(state, worker_id, behind=event.behind), event.progress)
    view = state.view(worker_id)
    if view is not None and generation > view.entered:
        state = changed(state, worker_id, entered=generation)
    if generation > state.highest:
        state = replace(state, highest=generation)
    if state.upcoming is not None and state.upcoming.number == generation:
        # All members enter it at the same step boundary, so one report is enough.
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
        # Only draining members are left out of a generation while alive.
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


_OBSERVERS: Mapping[type, Callable[[JobState, Any], JobState]] = {
    events.WorkerJoined: lambda state, event: _joined(state, event.member),
    events.WorkerLost: _lost,
    events.WorkerFailed: _failed,
    events.WorkerFinished: _finished,
    events.WorkerLeft: lambda state, event: _left(reached(state, event.worker_id, event.step), event.worker_id),
    events.WorkerEnded: lambda state, event: changed(state, event.worker_id, ended=True),
    events.HostLost: _host_lost,
    events.LoopBegun: _loop_begun,
    events.LoopEnded: lambda state, event: changed(state, event.worker_id, after_loop=True),
    events.ScriptEnded: lambda state, event: changed(state, event.worker_id, script_ended=True),
    events.DrainRequested: _drain_requested,
    events.ReplacementsEnded: _replacements_ended,
    events.ReplacementsResumed: _replacements_resumed,
    events.FaultInjected: _injected,
    events.CheckpointWritten: _checkpoint_written,
    events.CheckpointRestored: lambda state, event: replace(
        state, begun_from=event, branch=max(state.branch, event.branch)
    ),
    events.RolledBack: lambda state, event: replace(state, branch=max(state.branch, event.branch)),
    events.TimesMeasured: lambda state, event: replace(state, times=event),
    events.ExchangeBroken: lambda state, event: _broken(_advanced(state, event.progress), event),
    events.GenerationEntered: _generation_entered,
    events.WorkerCaughtUp: lambda state, event: changed(state, event.worker_id, behind=False),
    events.Answered: lambda state, event: _answered(state, event.worker_id, event.host),
    events.HoldExpired: lambda state, event: replace(state, holding=0) if state.holding == event.generation else state,
}
