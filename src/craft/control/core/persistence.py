"""What outlives a lighthouse: the generations it gave out, who may never come back, and whether the job is over.

``Loop`` saves before it tells anybody; a lighthouse that starts on the same run directory restores from it.
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


class Durable(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the job's state that must not be forgotten."""

    generation: Generation | None = None
    upcoming: Generation | None = None
    """Told to its members, who may enter it while no lighthouse is there."""
    highest: int = 0
    lost: tuple[Member, ...] = ()
    """Workers that must not act any more; one of them may still be running somewhere."""
    gone: tuple[str, ...] = ()
    """Workers that ended or left: their agents may say so once more, and it is no news."""
    draining: tuple[tuple[str, str], ...] = ()
    """Workers that are to leave, and why."""
    leave_by: tuple[tuple[str, float], ...] = ()
    """Those of them that count as lost from a certain time on, in seconds since 1970."""
    winding_down: str | None = None
    preempting: PreemptionOrder | None = None
    wishes: tuple[CheckpointWish, ...] = ()
    restoration: Restoration | None = None
    former: Generation | None = None
    """Set while the job begins again: nobody acts under it any more."""
    replacing: bool = True
    stopping: Stop | None = None
    loop: int = 1
    owed: tuple[LostAfterLoop, ...] = ()
    hosts: tuple[str, ...] = ()
    """Hosts of all workers but those that left."""
    left: int = 0
    """Members that left as they were told."""
    checkpoint: CheckpointWritten | msgspec.UnsetType | None = msgspec.UNSET
    """The newest complete one. Not in files of earlier versions, who had this and what follows in the journal alone."""
    begun_from: CheckpointRestored | None = None
    branch: int = 0


class DurableStore(Protocol):
    """Where a Durable is kept."""

    def save(self, durable: Durable) -> None:
        """Return only when ``durable`` would survive a crash."""


def durable_of(state: JobState) -> Durable:
    """Return what of ``state`` must be kept."""
    return Durable(
        generation=state.generation,
        upcoming=state.upcoming,
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
        winding_down=state.winding_down,
        preempting=state.preempting,
        wishes=state.wishes,
        restoration=state.restoration,
        former=state.former,
        replacing=state.replacing,
        stopping=state.stopping,
        loop=state.loop,
        owed=state.owed,
        hosts=tuple(sorted(state.known_hosts)),
        left=state.left,
        checkpoint=state.checkpoint,
        begun_from=state.begun_from,
        branch=state.branch,
    )


def history_of(state: JobState) -> tuple[object, ...]:
    """Return what is known of the job's checkpoints and rollbacks: where it changes, it is to be made durable."""
    return state.checkpoint, state.begun_from, state.branch


def restore(fresh: JobState, durable: Durable | None) -> JobState:
    """Return the state that a lighthouse begins with: ``fresh``, or what an earlier one left."""
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
        upcoming=durable.upcoming,
        highest=max(state.highest, durable.highest),
        winding_down=durable.winding_down,
        preempting=durable.preempting,
        wishes=durable.wishes,
        restoration=durable.restoration,
        former=durable.former,
        replacing=durable.replacing,
        holding=durable.former.number if durable.former is not None else 0,
        checkpoint=durable.checkpoint or None,
        begun_from=durable.begun_from,
        branch=max(durable.branch, durable.restoration.branch if durable.restoration is not None else 0),
        # What those had committed who are gone since is not in the file.
        reached=None,
        stopping=durable.stopping,
        loop=durable.loop,
        owed=durable.owed,
        hosts=durable.hosts,
        left_before=durable.left,
    )
