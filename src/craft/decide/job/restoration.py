"""When nobody is left who has the training state: from where a job begins again, and how often it tries.

``RestorePolicy`` asks whether it can be; ``membership`` takes the outcome into the state of the job.
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
    """How far a job goes to begin again by itself."""

    tries: Annotated[
        int,
        msgspec.Meta(ge=1),
        says("How often from one checkpoint without getting further than before."),
    ] = 3
    limit_s: Annotated[
        float,
        msgspec.Meta(ge=0.0, le=1e9),
        says("How long the workers of a job that begins again are waited for; more than two times lease_s."),
    ] = 60.0


class Basis(msgspec.Struct, frozen=True):
    """Where a job can begin again."""

    checkpoint: str | None
    """Name of a checkpoint; None: at the very beginning."""
    step: int


def basis(state: JobState) -> Basis | None:
    """Return from where the job can begin again; None if too much would be lost by it.

    That is the newest checkpoint of its own course: one that it has written, or the one that it began from. Without any it
    begins anew only if nothing was committed: to repeat days of work in silence is worse than a clear end.
    """
    written, begun = state.checkpoint, state.begun_from
    if written is not None and (begun is None or written.branch >= begun.branch):
        return Basis(written.name, written.step)
    if begun is not None:
        return Basis(begun.name, begun.step)
    return Basis(None, 0) if state.reached == 0 else None


def begun_again(state: JobState, action: Restore) -> JobState:
    """Who took part until now does so no more; who waits for a slot may have one in the generation that follows."""
    before, former = state.restoration, state.generation
    assert former is not None
    same = before is not None and before.checkpoint == action.checkpoint
    restoration = Restoration(
        number=1 if before is None else before.number + 1,
        branch=action.branch,
        checkpoint=action.checkpoint,
        step=action.step,
        after=former.number,
        tries=before.tries + in_vain(state, action.checkpoint) if before is not None and same else 1,
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
        # Their code after the loop is run again, with all else.
        owed=(),
    )


def _without_part(view: WorkerView) -> WorkerView:
    """A member of a generation that is no more: one that never entered any is as good as new."""
    return replace(view, standing="waiting" if view.fresh and not view.entered else "lost")


def may_have_state(state: JobState) -> bool:
    """Whether some member is left that may have the training state: more than such as were to take it from others."""
    members = state.generation.members if state.generation is not None else ()
    views = ((member, state.view(member.worker_id)) for member in members)
    return any(
        view is not None and view.standing == "member" and not (member.since and view.fresh and not view.entered)
        for member, view in views
    )


def in_vain(state: JobState, checkpoint: str | None) -> bool:
    """Whether the job began from this checkpoint already, and is not known to have got further than ever before."""
    before = state.restoration
    return before is not None and before.checkpoint == checkpoint and (state.reached or 0) <= before.furthest


def reached(state: JobState, worker_id: str, step: int | None) -> JobState:
    """A worker is gone that had committed so many steps; None: nobody knows."""
    view = state.view(worker_id)
    if view is None or view.standing != "member" or step == 0:
        return state
    return replace(state, reached=(state.reached or None) if step is None else max(state.reached or 0, step))


def may_still_run(state: JobState) -> tuple[str, ...]:
    """Members of the generation before that are not known to have ended: they must not go on beside the others."""
    former = state.former.worker_ids if state.former is not None else ()
    views = (state.view(worker_id) for worker_id in former)
    return tuple(
        view.member.worker_id for view in views if view is not None and view.standing == "lost" and not view.ended
    )


def cannot_commit(state: JobState) -> bool:
    """Whether those that may still run have lost a member: then their exchange is broken, and their lease runs out."""
    former = state.former.worker_ids if state.former is not None else ()
    return len(may_still_run(state)) < len(former)
