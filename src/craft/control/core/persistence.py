"""The part of the job state that survives a lighthouse: generations, fenced workers, the end of the job.

``Loop`` saves it before it sends a directive; a lighthouse on the same run directory restores from it.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
from msgspec.structs import replace

from craft.decide.job.apply import restarted
from craft.decide.job.state import JobState, LostAfterLoop, WorkerView
from craft.protocol.actions import Stop
from craft.protocol.events import CheckpointRestored, CheckpointWritten
from craft.protocol.membership import Generation, Member
from craft.protocol.messages import CheckpointWish, PreemptionOrder, Restoration

_KEPT_GONE = 256
_SAME = (
    "generation", "upcoming", "winding_down", "preempting", "wishes", "restoration", "former", "replacing", "stopping",
    "loop", "owed", "begun_from",
)  # fmt: skip
"""Fields that ``JobState`` and ``Durable`` share as they are."""


class Durable(msgspec.Struct, frozen=True, kw_only=True):
    """The durable part of the job state."""

    generation: Generation | None = None
    upcoming: Generation | None = None
    """Known to its members, which may enter it while no lighthouse runs."""
    highest: int = 0
    lost: tuple[Member, ...] = ()
    """Workers that must not act any more; some may still run."""
    gone: tuple[str, ...] = ()
    """Workers that ended or left; their agents may report that again."""
    draining: tuple[tuple[str, str], ...] = ()
    """(worker, reason): draining workers."""
    leave_by: tuple[tuple[str, float], ...] = ()
    """(worker, time): when a draining worker counts as lost, in seconds since 1970."""
    winding_down: str | None = None
    preempting: PreemptionOrder | None = None
    wishes: tuple[CheckpointWish, ...] = ()
    restoration: Restoration | None = None
    former: Generation | None = None
    """Set during a restore: no worker acts under it any more."""
    replacing: bool = True
    stopping: Stop | None = None
    loop: int = 1
    owed: tuple[LostAfterLoop, ...] = ()
    hosts: tuple[str, ...] = ()
    """Hosts of all workers except those that left."""
    left: int = 0
    """Members that left on request."""
    checkpoint: CheckpointWritten | msgspec.UnsetType | None = msgspec.UNSET
    """The newest complete checkpoint. Files of earlier versions lack this and the fields below."""
    begun_from: CheckpointRestored | None = None
    branch: int = 0


class DurableStore(Protocol):
    """Stores a Durable."""

    def save(self, durable: Durable) -> None:
        """Return only when ``durable`` would survive a crash."""


def durable_of(state: JobState) -> Durable:
    """Return the durable part of ``state``."""
    return Durable(
        **{name: getattr(state, name) for name in _SAME},
        highest=state.highest,
        lost=tuple(view.member for view in state.having("lost") if not view.ended),
        gone=tuple(
            view.member.worker_id for view in state.having("lost", "left") if view.ended or view.standing == "left"
        )[-_KEPT_GONE:],
        draining=tuple(
            (view.member.worker_id, view.draining)
            for view in state.having("waiting", "member")
            if view.draining is not None
        ),
        leave_by=tuple(
            (view.member.worker_id, view.leave_by)
            for view in state.having("waiting", "member")
            if view.leave_by is not None
        ),
        hosts=tuple(sorted(state.known_hosts)),
        left=state.left,
        checkpoint=state.checkpoint,
        branch=state.branch,
    )


def history_of(state: JobState) -> tuple[object, ...]:
    """Return the job's checkpoints and branch: a change of these is made durable."""
    return state.checkpoint, state.begun_from, state.branch


def restore(fresh: JobState, durable: Durable | None) -> JobState:
    """Return the initial state of a lighthouse: ``fresh``, or what an earlier one saved."""
    if durable is None:
        return fresh
    state = restarted(fresh, durable.generation)
    lost = {member.worker_id for member in durable.lost}
    known = [view for view in state.workers if view.member.worker_id not in lost]
    inside = {view.member.worker_id for view in known}
    joiners = durable.upcoming.members if durable.upcoming is not None else ()
    living = [*known, *(WorkerView(member=member) for member in joiners if member.worker_id not in inside | lost)]
    leaving, leave_by = dict(durable.draining), dict(durable.leave_by)

    def reminded(view: WorkerView) -> WorkerView:
        worker_id = view.member.worker_id
        return replace(view, draining=leaving.get(worker_id), leave_by=leave_by.get(worker_id))

    return replace(
        state,
        workers=(
            *map(reminded, living),
            *(WorkerView(member=member, standing="lost") for member in durable.lost),
            *(
                WorkerView(member=Member(worker_id=worker_id, host=""), standing="lost", ended=True)
                for worker_id in durable.gone
                if worker_id not in inside
            ),
        ),
        **{name: getattr(durable, name) for name in _SAME},
        highest=max(state.highest, durable.highest),
        holding=durable.former.number if durable.former is not None else 0,
        checkpoint=durable.checkpoint or None,
        branch=max(durable.branch, durable.restoration.branch if durable.restoration is not None else 0),
        # Steps committed by workers that are gone since then are not in the file.
        reached=None,
        hosts=durable.hosts,
        left_before=durable.left,
    )
