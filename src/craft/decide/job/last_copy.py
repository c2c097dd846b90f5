"""Never give up the last copy of the training state on suspicion.

A worker that is stopped, unreachable or silent may still run. If no other member is known to have the training state,
the job waits for it: ``keep_last_copy`` filters every answer of the policies, ``LastCopyPolicy`` answers silent hosts.
"""

from __future__ import annotations

from collections.abc import Collection

from craft.decide.job.state import JobState
from craft.protocol.actions import AnyAction, Await, DeclareLost
from craft.protocol.events import AnyEvent, AwaitExpired, WorkerOverdue

SUSPICIONS = frozenset({"watch", "peers"})
"""Sources of suspected losses. Agents observe the loss itself; people, alerts and GPU readings report facts."""
STOPPED = "stopped"
LIMIT_S = 60.0
"""A job that can restore from a checkpoint waits this long for a worker that does not answer."""


def holders(state: JobState) -> frozenset[str]:
    """Return the live members that are known to have the training state."""
    members = state.generation.members if state.generation is not None else ()
    views = ((member, state.view(member.worker_id)) for member in members)
    return frozenset(
        member.worker_id
        for member, view in views
        if view is not None
        and view.standing == "member"
        and not view.behind
        # A member that joined later has the state once it says so; a restarted lighthouse may have missed that.
        and not (member.since and not view.entered)
    )


def is_last_copy(state: JobState, suspects: Collection[str], unable: Collection[str] = ()) -> bool:
    """Return whether the job has no training state without ``suspects``; ``unable``: others that do not answer.

    Where the model is sharded: whether it has none at the position of one of them.
    """
    if state.generation is None or state.ending or state.having("finished"):
        return False
    known = holders(state)
    left = {state.position_of(worker_id) for worker_id in known.difference(suspects, unable)}
    return any(state.position_of(worker_id) not in left for worker_id in known.intersection(suspects))


def has_checkpoint(state: JobState) -> bool:
    """Return whether the job can restore from a checkpoint."""
    return state.checkpoint is not None or state.begun_from is not None


def keep_last_copy(state: JobState, event: AnyEvent, actions: tuple[AnyAction, ...]) -> tuple[AnyAction, ...]:
    """Return ``actions`` with an ``Await`` in place of each suspected loss of the last copy."""
    if isinstance(event, AwaitExpired) or _is_hopeless(state, event):
        return actions
    unable = event.stopped if isinstance(event, WorkerOverdue) else ()
    lost: set[str] = set()
    kept: list[AnyAction] = []
    for action in actions:
        if isinstance(action, DeclareLost) and action.source in SUSPICIONS:
            if is_last_copy(state, {*lost, action.worker_id}, unable):
                kept += _wait(state, action)
                continue
            lost.add(action.worker_id)
        kept.append(action)
    return tuple(kept)


def _is_hopeless(state: JobState, event: AnyEvent) -> bool:
    """Return whether a worker hangs in its code and another can do its work: from a checkpoint, or from step 0."""
    hangs = isinstance(event, WorkerOverdue) and event.phase != STOPPED
    return isinstance(event, WorkerOverdue) and hangs and (has_checkpoint(state) or event.step == 0)


def _wait(state: JobState, action: DeclareLost) -> tuple[AnyAction, ...]:
    if any(each.worker_id == action.worker_id for each in state.awaited):
        return ()
    return (awaiting(state, action.reason, worker_id=action.worker_id),)


def may_restore(state: JobState, host: str | None) -> bool:
    """Return whether the job may restore without waiting longer for all workers of ``host``, or for one worker (None).

    It needs a checkpoint. And the old generation must be unable to train on: a host with all members still could.
    """
    assert state.generation is not None
    return has_checkpoint(state) and (host is None or any(each.host != host for each in state.generation.members))


def awaiting(state: JobState, what: str, *, worker_id: str | None = None, host: str | None = None) -> Await:
    """Return the wait for a worker or a host; ``what`` is the reason for the suspicion."""
    name = worker_id if worker_id is not None else f"host {host}"
    limit_s = LIMIT_S if may_restore(state, host) else None
    up_to = f", for up to {LIMIT_S:g} s" if limit_s is not None else ""
    reason = (
        f"{name} does not answer ({what}), and no other that does has the training state: the job waits for it{up_to}"
    )
    return Await(worker_id=worker_id, host=host, what=what, limit_s=limit_s, reason=reason)
