"""The lighthouse's view of the job, and how an action changes it.

``observe`` takes an event in: what is now known. A policy answers the event with actions; ``apply`` takes an action in:
what is now wanted. Both are pure, so that every decision can be replayed from the journal.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec.structs import replace

from craft.protocol.actions import AnyAction, Fence, Propose, Reconfigure, Stop, Watch, WindDown
from craft.protocol.events import (
    AnyEvent,
    ExchangeBroken,
    GenerationEntered,
    HostLost,
    WorkerFailed,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from craft.protocol.membership import Generation, Member

Standing = Literal["waiting", "member", "lost", "finished"]


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as the lighthouse knows it. One that is lost stays lost: it comes back under another id, or never."""

    member: Member
    standing: Standing = "waiting"
    entered: int = 0
    """The newest generation under which it reported to act."""


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """All that decisions are made from."""

    slots: int
    """Workers to wait for before the first generation, and never more than this in one."""
    min_workers: int = 1
    workers: tuple[WorkerView, ...] = ()
    generation: Generation | None = None
    """What every member is to act under."""
    upcoming: Generation | None = None
    """What its members prepare while they go on, and enter together at a step boundary."""
    highest: int = 0
    """The highest generation number ever given out or heard of; numbers are never used twice."""
    recovering: bool = False
    """After a restart: it is not known yet under which generation the workers act."""
    absent: int = 0
    """Workers that were expected and will never join: they were lost before they could."""
    broken: tuple[int, ...] = ()
    """Generations of which a member said that its exchange broke."""
    failures: tuple[WorkerFailed, ...] = ()
    winding_down: str | None = None
    """Why the workers are to leave their loops, if they are."""
    stopping: Stop | None = None

    def view(self, worker_id: str) -> WorkerView | None:
        return next((view for view in self.workers if view.member.worker_id == worker_id), None)

    def having(self, *standings: Standing) -> tuple[WorkerView, ...]:
        return tuple(view for view in self.workers if view.standing in standings)

    @property
    def members(self) -> tuple[str, ...]:
        """Members of the current generation that are not lost and not finished, in the order of their ranks."""
        if self.generation is None:
            return ()
        present = frozenset(view.member.worker_id for view in self.having("member"))
        return tuple(worker_id for worker_id in self.generation.worker_ids if worker_id in present)


def observe(state: JobState, event: AnyEvent) -> JobState:
    """Return what is known after ``event``; a repeated or late event changes nothing."""
    if isinstance(event, WorkerJoined):
        return _joined(state, event.member)
    if isinstance(event, WorkerLost):
        return _gone(state, event.worker_id, "lost")
    if isinstance(event, WorkerFailed):
        state = _gone(state, event.worker_id, "lost")
        return state if event in state.failures else replace(state, failures=(*state.failures, event))
    if isinstance(event, WorkerFinished):
        return _gone(state, event.worker_id, "finished")
    if isinstance(event, HostLost):
        for view in state.having("waiting", "member"):
            if view.member.host == event.host:
                state = _gone(state, view.member.worker_id, "lost")
        return state
    if isinstance(event, ExchangeBroken):
        return replace(state, broken=tuple(sorted({*state.broken, event.generation})))
    if isinstance(event, GenerationEntered):
        return _entered(state, event.worker_id, event.generation)
    return state


def _joined(state: JobState, member: Member) -> JobState:
    if state.view(member.worker_id) is not None:
        return state
    return replace(state, workers=(*state.workers, WorkerView(member=member)))


def _gone(state: JobState, worker_id: str, standing: Standing) -> JobState:
    view = state.view(worker_id)
    if view is None:
        # It ended before it joined. Remember it, so that the first generation does not wait for it for ever.
        unknown = WorkerView(member=Member(worker_id=worker_id), standing=standing)
        return replace(state, workers=(*state.workers, unknown), absent=state.absent + 1)
    if view.standing in ("lost", "finished"):
        return state
    if view.standing == "waiting" and state.generation is None:
        state = replace(state, absent=state.absent + 1)
    ended = replace(view, standing=standing)
    return replace(state, workers=tuple(ended if other is view else other for other in state.workers))


def _entered(state: JobState, worker_id: str, generation: int) -> JobState:
    workers = tuple(
        replace(view, entered=max(view.entered, generation)) if view.member.worker_id == worker_id else view
        for view in state.workers
    )
    state = replace(state, workers=workers, highest=max(state.highest, generation))
    if state.upcoming is not None and state.upcoming.number == generation:
        # All enter it at the same step boundary, so one that has is enough to know.
        state = _adopt(replace(state, upcoming=None), state.upcoming)
    if state.recovering and state.generation is not None and state.generation.number == generation:
        views = state.having("member")
        state = replace(state, recovering=any(view.entered < generation for view in views))
    return state


def _adopt(state: JobState, generation: Generation) -> JobState:
    inside = frozenset(generation.worker_ids)
    workers = tuple(
        replace(view, standing="member") if view.member.worker_id in inside and view.standing == "waiting" else view
        for view in state.workers
    )
    return replace(state, workers=workers, generation=generation, highest=max(state.highest, generation.number))


def apply(state: JobState, action: AnyAction, nonce: str) -> JobState:
    """Return what is wanted after ``action``; ``nonce`` names the generation that it may make."""
    if isinstance(action, Reconfigure):
        made = _make(state, action.members, nonce)
        return _adopt(replace(state, upcoming=None, recovering=False), made)
    if isinstance(action, Propose):
        made = _make(state, action.members, nonce)
        return replace(state, upcoming=made, highest=made.number)
    if isinstance(action, Fence):
        return _gone(state, action.worker_id, "lost")
    if isinstance(action, WindDown):
        return replace(state, winding_down=state.winding_down or action.reason)
    if isinstance(action, Stop):
        return state if state.stopping is not None else replace(state, stopping=action)
    assert isinstance(action, Watch)
    return state


def _make(state: JobState, worker_ids: Iterable[str], nonce: str) -> Generation:
    number = state.highest + 1
    members = {view.member.worker_id: replace(view.member, since=number) for view in state.workers}
    if state.generation is None:
        members = {worker_id: replace(member, since=0) for worker_id, member in members.items()}
    else:
        members |= {member.worker_id: member for member in state.generation.members}
    return Generation(number=number, nonce=nonce, members=tuple(members[worker_id] for worker_id in worker_ids))


def restarted(state: JobState, durable: Generation | None) -> JobState:
    """The state of a lighthouse that begins again with nothing but the generation it last made durable."""
    fresh = JobState(slots=state.slots, min_workers=state.min_workers)
    if durable is None:
        return fresh
    workers = tuple(WorkerView(member=member, standing="member") for member in durable.members)
    return replace(fresh, workers=workers, generation=durable, highest=durable.number, recovering=True)
