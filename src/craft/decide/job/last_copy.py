"""The last copy of the training state is never given up on suspicion.

A worker that is stopped, out of reach or silent may still run. If no other member is known to have the training state, the job
waits for it: ``keep_last_copy`` looks at every answer of the policies, ``LastCopyPolicy`` at silent hosts.
"""

from __future__ import annotations

from collections.abc import Collection

from craft.decide.job.state import JobState
from craft.protocol.actions import AnyAction, Await, DeclareLost
from craft.protocol.events import AnyEvent, AwaitExpired, WorkerOverdue

SUSPICIONS = frozenset({"watch", "peers"})
"""Sources of a loss that was not observed. Agents observe; people, alerts and readings of a GPU say what they know."""
STOPPED = "stopped"
LIMIT_S = 60.0
"""A job that could begin again from a checkpoint waits no longer than this for one that does not answer."""


def holders(state: JobState) -> frozenset[str]:
    """Members that are known to have the training state, and not to be lost."""
    members = state.generation.members if state.generation is not None else ()
    views = ((member, state.view(member.worker_id)) for member in members)
    return frozenset(
        member.worker_id
        for member, view in views
        if view is not None
        and view.standing == "member"
        and not view.behind
        # One that came later has it when it says so, though an earlier lighthouse may have heard that before.
        and not (member.since and not view.entered)
    )


def is_last_copy(state: JobState, suspects: Collection[str], unable: Collection[str] = ()) -> bool:
    """Whether the job would have no training state without ``suspects``; ``unable``: others that do not answer either."""
    if state.generation is None or state.ending or state.having("finished"):
        return False
    known = holders(state)
    return bool(known.intersection(suspects)) and not known.difference(suspects, unable)


def has_checkpoint(state: JobState) -> bool:
    """Whether the job could begin again from a checkpoint."""
    return state.checkpoint is not None or state.begun_from is not None


def keep_last_copy(state: JobState, event: AnyEvent, actions: tuple[AnyAction, ...]) -> tuple[AnyAction, ...]:
    """Return ``actions``, with a wait in the place of each loss that is a suspicion and would take the last copy."""
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
    """Whether a worker hangs in its code, and another one can do its work: from a checkpoint, or as nothing was done yet."""
    hangs = isinstance(event, WorkerOverdue) and event.phase != STOPPED
    return isinstance(event, WorkerOverdue) and hangs and (has_checkpoint(state) or event.step == 0)


def _wait(state: JobState, action: DeclareLost) -> tuple[AnyAction, ...]:
    if any(each.worker_id == action.worker_id for each in state.awaited):
        return ()
    return (awaiting(state, action.reason, worker_id=action.worker_id),)


def may_begin(state: JobState, host: str | None) -> bool:
    """Whether the job may begin again without what it waits for: all workers of ``host``, or one worker where that is None.

    There must be a checkpoint. And it must be the only course of the job: a host with all members may still train there.
    """
    assert state.generation is not None
    return has_checkpoint(state) and (host is None or any(each.host != host for each in state.generation.members))


def awaiting(state: JobState, what: str, *, worker_id: str | None = None, host: str | None = None) -> Await:
    """The wait for a worker or a host about which ``what`` is known."""
    name = worker_id if worker_id is not None else f"host {host}"
    limit_s = LIMIT_S if may_begin(state, host) else None
    up_to = f", for up to {LIMIT_S:g} s" if limit_s is not None else ""
    reason = (
        f"{name} does not answer ({what}), and no other that does has the training state: the job waits for it{up_to}"
    )
    return Await(worker_id=worker_id, host=host, what=what, limit_s=limit_s, reason=reason)
