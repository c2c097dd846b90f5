"""Answer requests of people and other systems: drain, checkpoint, abort."""

from __future__ import annotations

from craft.decide.job.observe import drains, observe
from craft.decide.job.state import JobState
from craft.decide.policies.membership import proposed
from craft.protocol.actions import AnyAction, DeclareLost, Drain, Reconfigure, Release, TakeCheckpoint
from craft.protocol.events import AbortRequested, AnyEvent, CheckpointRequested, DrainExpired, DrainRequested


def drain(state: JobState, request: DrainRequested, now: float = 0.0) -> tuple[AnyAction, ...]:
    """Let the workers of ``request`` leave at a step boundary; () if all of them leave by then already.

    For policies that want a worker to leave. Policies of other packages return ``RequestDrain``, which leads here too.
    """
    return _leave(observe(state, request), request) if drains(state, request, now) else ()


def _leave(state: JobState, request: DrainRequested) -> tuple[AnyAction, ...]:
    views = [
        view
        for view in state.having("waiting", "member")
        if view.member.worker_id == request.worker_id or view.member.host == request.host
    ]
    # A spare has nothing that the others need: it leaves at once.
    released = tuple(
        Release(worker_id=view.member.worker_id, reason=f"a spare that is to leave: {request.reason}")
        for view in views
        if view.standing == "waiting"
    )
    drained = tuple(
        Drain(worker_id=view.member.worker_id, deadline_s=request.deadline_s, reason=request.reason)
        for view in views
        if view.standing == "member"
    )
    return (*released, *drained, *proposed(state))


class DrainPolicy:
    """Lets workers leave at a step boundary; those still there at their deadline are declared lost."""

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if isinstance(event, DrainRequested):
            return _leave(state, event)
        if not isinstance(event, DrainExpired):
            return ()
        view = state.view(event.worker_id)
        if view is None or view.draining is None or view.standing not in ("waiting", "member"):
            return ()
        reason = f"was to leave ({view.draining}) and is still there at its deadline"
        return (DeclareLost(worker_id=event.worker_id, source="drain", reason=reason),)


class CheckpointPolicy:
    """Takes a checkpoint at the next step boundary."""

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if isinstance(event, CheckpointRequested):
            return (TakeCheckpoint(tag=event.tag, reason=event.reason),)
        return ()


class AbortPolicy:
    """Aborts the in-flight collective on every member and re-forms the group with the same members."""

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if not isinstance(event, AbortRequested) or state.generation is None or state.holding or not state.members:
            return ()
        reason = f"{event.reason}: all members abort generation {state.generation.number} and meet again"
        return (Reconfigure(members=state.members, reason=reason),)
