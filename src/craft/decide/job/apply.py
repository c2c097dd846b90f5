"""Apply actions to the job state; start the state of a restarted lighthouse."""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec.structs import replace

from craft.decide.job.observe import adopt, changed, gone
from craft.decide.job.restoration import begun_again
from craft.decide.job.state import Awaited, JobState, WorkerView
from craft.protocol import actions
from craft.protocol.membership import Generation, Member
from craft.protocol.messages import CheckpointWish, PreemptionOrder

_KEPT_WISHES = 64
"""Keep this many checkpoint requests: workers take them one after the other."""


def apply(state: JobState, action: actions.AnyAction, nonce: str, now: float = 0.0) -> JobState:
    """Return the state after ``action``; ``nonce`` names the generation that it may make.

    ``now``: in seconds since 1970; deadlines of drained workers count from it.
    """
    if isinstance(action, actions.Reconfigure):
        made = _make(state, action.members, nonce)
        retries = state.retries + 1 if action.again else 0
        # With the same members, what they found out about each other still holds.
        complaints, missed = (state.complaints, state.missed) if action.again else ((), ())
        replacing = state.replacing if action.replacing is None else action.replacing
        state = replace(state, upcoming=None, recovering=False, retries=retries, missed=missed, replacing=replacing)
        adopted = adopt(state, made)
        return replace(adopted, complaints=complaints)
    if isinstance(action, actions.Propose):
        made = _make(state, action.members, nonce)
        return replace(state, upcoming=made, highest=made.number)
    if isinstance(action, actions.Fence):
        return gone(state, action.worker_id, "lost")
    if isinstance(action, actions.Release):
        return gone(state, action.worker_id, "left")
    if isinstance(action, actions.MoveSpare):
        state = gone(state, action.worker_id, "left")
        return replace(state, moving=(*state.moving, (action.worker_id, action.position)))
    if isinstance(action, actions.Await):
        return replace(state, awaited=(*state.awaited, _awaited(action)))
    if isinstance(action, actions.Hold):
        return replace(state, holding=action.generation, upcoming=None)
    if isinstance(action, actions.Restore):
        return begun_again(state, action)
    if isinstance(action, actions.Probe):
        return replace(state, probing=action.generation)
    if isinstance(action, actions.Drain):
        return _leaving(state, action, now)
    if isinstance(action, actions.WindDown):
        return replace(state, winding_down=state.winding_down or action.reason)
    if isinstance(action, actions.Preempt):
        reason = action.reason if state.preempting is None else state.preempting.reason
        return replace(state, preempting=PreemptionOrder(reason=reason, deadline=action.deadline))
    if isinstance(action, actions.TakeCheckpoint):
        number = state.wishes[-1].number + 1 if state.wishes else 1
        return replace(state, wishes=(*state.wishes, CheckpointWish(number=number, tag=action.tag))[-_KEPT_WISHES:])
    if isinstance(action, actions.Stop):
        return state if state.stopping is not None else replace(state, stopping=action)
    # Watch, DeclareLost and RequestDrain change nothing here: the loop turns them into events.
    return state


def _awaited(action: actions.Await) -> Awaited:
    return Awaited(worker_id=action.worker_id, host=action.host, what=action.what)


def _leaving(state: JobState, action: actions.Drain, now: float) -> JobState:
    view = state.view(action.worker_id)
    leave_by = view.leave_by if view is not None else None
    if action.deadline_s is not None:
        leave_by = min(now + action.deadline_s, leave_by if leave_by is not None else math.inf)
    return changed(state, action.worker_id, draining=action.reason, leave_by=leave_by)


def _make(state: JobState, worker_ids: Iterable[str], nonce: str) -> Generation:
    number = state.highest + 1
    known = {member.worker_id: member for member in state.generation.members} if state.generation is not None else {}

    def member(worker_id: str) -> Member:
        if worker_id in known:
            return known[worker_id]
        view = state.view(worker_id)
        assert view is not None
        return replace(view.member, since=0 if state.generation is None else number)

    members = tuple(map(member, worker_ids))
    if state.replica_size == 1:
        return Generation(number=number, nonce=nonce, members=members)
    slots = state.slots_of([each.worker_id for each in members])
    placed = tuple(replace(each, slot=slot) for each, slot in zip(members, slots, strict=True))
    return Generation(number=number, nonce=nonce, members=placed, replica_size=state.replica_size)


def restarted(state: JobState, durable: Generation | None) -> JobState:
    """Return the state of a restarted lighthouse, which knows only the last durable generation."""
    fresh = JobState(slots=state.slots, min_workers=state.min_workers, replica_size=state.replica_size)
    if durable is None:
        return fresh
    workers = tuple(WorkerView(member=member, standing="member") for member in durable.members)
    return replace(fresh, workers=workers, generation=durable, highest=durable.number, recovering=True)
