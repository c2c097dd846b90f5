"""Restore a job that lost every copy of the training state: from which checkpoint, and how often.

``RestorePolicy`` decides; ``apply`` takes a ``Restore`` into the job state by ``restored``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec.structs import replace

from craft.protocol.actions import Restore
from craft.protocol.messages import Restoration
from craft.protocol.values.config import says

if TYPE_CHECKING:
    from craft.decide.job.state import JobState, WorkerView


class RestoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of an automatic restore."""

    tries: Annotated[
        int, msgspec.Meta(ge=1), says("How often from one checkpoint without getting further than before.")
    ] = 3
    limit_s: Annotated[
        float,
        msgspec.Meta(ge=0.0, le=1e9),
        says("How long the workers of a job that begins again are waited for; more than two times lease_s."),
    ] = 60.0


class Basis(msgspec.Struct, frozen=True):
    """Where a job can start again."""

    checkpoint: str | None
    """Name of a checkpoint; None: step 0."""
    step: int


def basis(state: JobState) -> Basis | None:
    """Return where the job can start again; None if too much work would be lost.

    That is the newest checkpoint that it wrote, or the one that it started from. Without any, a job starts again from
    step 0 only if nothing was committed: silently repeating days of work is worse than a clear end.
    """
    written, begun = state.checkpoint, state.begun_from
    if written is not None and (begun is None or written.branch >= begun.branch):
        return Basis(written.name, written.step)
    if begun is not None:
        return Basis(begun.name, begun.step)
    return Basis(None, 0) if state.reached == 0 else None


def begun_again(state: JobState, action: Restore) -> JobState:
    """Return the state after a restore: former members are out, waiting workers can join the next generation."""
    before, former = state.restoration, state.generation
    assert former is not None
    same = before is not None and before.checkpoint == action.checkpoint
    restoration = Restoration(
        number=1 if before is None else before.number + 1,
        branch=action.branch,
        checkpoint=action.checkpoint,
        step=action.step,
        after=former.number,
        tries=before.tries + made_no_progress(state, action.checkpoint) if before is not None and same else 1,
        furthest=max(action.step, state.reached or 0, before.furthest if before is not None else 0),
        limit_s=action.limit_s,
    )
    return replace(
        state,
        workers=tuple(_without_part(each) if each.standing == "member" else each for each in state.workers),
        generation=None,
        upcoming=None,
        former=former,
        restoration=restoration,
        branch=action.branch,
        reached=action.step,
        recovering=False,
        broken=(),
        complaints=(),
        retries=0,
        missed=(),
        probing=0,
        holding=former.number,
        replacing=True,
        absent=0,
        # The restored job runs the code after the loop again.
        owed=(),
    )


def _without_part(view: WorkerView) -> WorkerView:
    """Return a former member's view: one that never entered a generation is as good as new."""
    return replace(view, standing="waiting" if view.fresh and not view.entered else "lost")


def may_have_state(state: JobState) -> bool:
    """Return whether live members may have the training state, beyond those that were to receive it.

    Where the model is sharded: at every position.
    """
    members = state.generation.members if state.generation is not None else ()
    views = ((member, state.view(member.worker_id)) for member in members)
    found = {
        state.position_of(member.worker_id)
        for member, view in views
        if view is not None and view.standing == "member" and not (member.since and view.fresh and not view.entered)
    }
    return len(found) == state.replica_size


def made_no_progress(state: JobState, checkpoint: str | None) -> bool:
    """Return whether the job already started from this checkpoint and got no further than before."""
    before = state.restoration
    return before is not None and before.checkpoint == checkpoint and (state.reached or 0) <= before.furthest


def reached(state: JobState, worker_id: str, step: int | None) -> JobState:
    """Record the committed steps of a worker that is gone; None: unknown."""
    view = state.view(worker_id)
    if view is None or view.standing != "member" or step == 0:
        return state
    return replace(state, reached=(state.reached or None) if step is None else max(state.reached or 0, step))


def may_still_run(state: JobState) -> tuple[str, ...]:
    """Return former members not known to have ended: they must not train beside the restored job."""
    former = state.former.worker_ids if state.former is not None else ()
    views = (state.view(worker_id) for worker_id in former)
    return tuple(
        view.member.worker_id for view in views if view is not None and view.standing == "lost" and not view.ended
    )


def cannot_commit(state: JobState) -> bool:
    """Return whether those that may still run lost a member: then their exchange breaks and their lease expires."""
    former = state.former.worker_ids if state.former is not None else ()
    return len(may_still_run(state)) < len(former)
