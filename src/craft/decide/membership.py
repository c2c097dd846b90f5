"""The lighthouse's view of the job, and how an action changes it.

``observe`` takes an event in: what is now known. A policy answers the event with actions; ``apply`` takes an action in:
what is now wanted. Both are pure, so that every decision can be replayed from the journal.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from craft.decide import roster
from craft.decide.restoration import begun_again, reached
from craft.protocol.actions import (
    AnyAction,
    Drain,
    Fence,
    Hold,
    Preempt,
    Probe,
    Propose,
    Reconfigure,
    Release,
    Restore,
    Stop,
    TakeCheckpoint,
    WindDown,
)
from craft.protocol.events import (
    AnyEvent,
    CheckpointRestored,
    CheckpointWritten,
    DrainRequested,
    ExchangeBroken,
    FaultInjected,
    GenerationEntered,
    HoldExpired,
    HostLost,
    ReplacementsEnded,
    RolledBack,
    TimesMeasured,
    WorkerEnded,
    WorkerFailed,
    WorkerFinished,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)
from craft.protocol.injections import BY_LIGHTHOUSE, KEPT
from craft.protocol.membership import Generation, Member
from craft.protocol.messages import CheckpointWish, Preemption, Restoration

Standing = Literal["waiting", "member", "lost", "left", "finished"]
"""``waiting``: without a slot, a spare; ``left``: went at a step boundary, as it was told."""

GONE: tuple[Standing, ...] = ("lost", "left", "finished")
_KEPT_GONE = 1000
"""So many workers that are gone are remembered: a report of one that nobody knows would make it a new one."""
_KEPT_FAILURES = 100
_KEPT_WISHES = 64
"""Workers take the checkpoints of so many wishes one after the other; nobody has more of them before the first is taken."""


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as the lighthouse knows it. One that is lost stays lost: it comes back under another id, or never."""

    member: Member
    standing: Standing = "waiting"
    entered: int = 0
    """The newest generation under which it reported to act."""
    fresh: bool = False
    """Whether this lighthouse heard it come: only then nothing is missed in ``entered``."""
    draining: str | None = None
    """Why it is to leave, if it is."""
    ended: bool = False
    """Whether its process is known to be no more."""


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
    """The current or upcoming generation, if a member said that its exchange broke."""
    complaints: tuple[tuple[str, str], ...] = ()
    """(who, about whom): members of the current generation that could not connect to one another."""
    retries: int = 0
    """How many generations in a row were made because the one before broke though nobody was lost."""
    probing: int = 0
    """The generation whose members are to find out whom they can reach; 0: none."""
    holding: int = 0
    """The generation whose lost members are waited for to be replaced; 0: none."""
    unreplaced: tuple[str, ...] = ()
    """Hosts that start no more workers in the place of lost ones."""
    failures: tuple[WorkerFailed, ...] = ()
    injections: tuple[FaultInjected, ...] = ()
    """The latest faults that agents and workers are to carry out; they decide nothing."""
    winding_down: str | None = None
    """Why the workers are to leave their loops, if they are."""
    preempting: Preemption | None = None
    """Why, and until when, the job is to make room, if it is."""
    wishes: tuple[CheckpointWish, ...] = ()
    """The latest wishes for checkpoints."""
    checkpoint: CheckpointWritten | None = None
    """The newest that is complete; what a job that makes room says of itself at its end."""
    begun_from: CheckpointRestored | None = None
    """The checkpoint from which this course of the job began, if it began from one."""
    branch: int = 0
    """The newest branch of history that is known of."""
    reached: int | None = 0
    """Committed steps of those who are gone, since the job last began; None: not known, perhaps there were some."""
    restoration: Restoration | None = None
    """From where the job began again, the last time that it did."""
    replacing: bool = True
    """Whether free slots are filled: not where that was found to cost more than it saves."""
    times: TimesMeasured | None = None
    """How long things take; known where answers to a loss are chosen by cost."""
    former: Generation | None = None
    """The last generation before that, until a new one is made."""
    stopping: Stop | None = None

    def view(self, worker_id: str) -> WorkerView | None:
        return roster.find(self.workers, worker_id)

    def having(self, *standings: Standing) -> tuple[WorkerView, ...]:
        return roster.having(self.workers, standings)

    @property
    def members(self) -> tuple[str, ...]:
        """Members of the current generation that are not lost and not finished, in the order of their ranks."""
        if self.generation is None:
            return ()
        return roster.present(self.workers, self.generation)

    @property
    def staying(self) -> tuple[str, ...]:
        """Those of ``members`` that are not about to leave."""
        leaving = frozenset(view.member.worker_id for view in self.having("member") if view.draining is not None)
        return tuple(worker_id for worker_id in self.members if worker_id not in leaving)

    @property
    def spares(self) -> tuple[str, ...]:
        """Workers without a slot that could take one."""
        return tuple(view.member.worker_id for view in self.having("waiting") if view.draining is None)

    @property
    def saved(self) -> tuple[int, int] | None:
        """Branch and committed steps of the newest complete checkpoint."""
        return None if self.checkpoint is None else (self.checkpoint.branch, self.checkpoint.step)

    @property
    def ending(self) -> bool:
        """Whether every worker is to leave at the next step boundary: nobody joins any more."""
        return self.winding_down is not None or self.preempting is not None

    @property
    def restoring(self) -> bool:
        """Whether the job begins again, and waits for the workers to do so."""
        return self.generation is None and self.former is not None

    @property
    def replaceable(self) -> bool:
        """Whether somebody can still come: some host starts workers in the place of lost ones."""
        hosts = {view.member.host for view in self.workers if view.standing != "left"}
        return bool(hosts - set(self.unreplaced))


def observe(state: JobState, event: AnyEvent) -> JobState:
    """Return what is known after ``event``; a repeated or late event changes nothing."""
    if isinstance(event, WorkerJoined):
        return _joined(state, event.member)
    if isinstance(event, WorkerLost):
        state = reached(state, event.worker_id, event.step)
        return _gone(state, event.worker_id, "lost", ended=event.source == "agent")
    if isinstance(event, WorkerFailed):
        state = reached(state, event.worker_id, event.step or 0)
        state = _gone(state, event.worker_id, "lost")
        failures = (*state.failures, event)[-_KEPT_FAILURES:]
        return state if event in state.failures else replace(state, failures=failures)
    if isinstance(event, WorkerFinished):
        state = reached(state, event.worker_id, event.step)
        # Of a job that makes room, its end may be known before its word that it left.
        left = state.preempting is not None and not event.complete
        return _gone(state, event.worker_id, "left" if left else "finished")
    if isinstance(event, WorkerLeft):
        return _left(reached(state, event.worker_id, event.step), event.worker_id)
    if isinstance(event, WorkerEnded):
        return _changed(state, event.worker_id, ended=True)
    if isinstance(event, HostLost):
        for view in state.having("waiting", "member"):
            if view.member.host == event.host:
                state = reached(state, view.member.worker_id, event.step)
                state = _gone(state, view.member.worker_id, "lost")
        return state
    if isinstance(event, DrainRequested):
        for worker_id in to_drain(state, event):
            state = _changed(state, worker_id, draining=event.reason)
        return state
    if isinstance(event, ReplacementsEnded):
        return replace(state, unreplaced=tuple(sorted({*state.unreplaced, event.host})))
    if isinstance(event, FaultInjected) and event.fault not in BY_LIGHTHOUSE:
        return replace(state, injections=(*state.injections, event)[-KEPT:])
    if isinstance(event, CheckpointWritten):
        newest = max(filter(None, (state.checkpoint, event)), key=lambda each: (each.branch, each.step))
        return replace(state, checkpoint=newest, branch=max(state.branch, event.branch))
    if isinstance(event, CheckpointRestored):
        return replace(state, begun_from=event, branch=max(state.branch, event.branch))
    if isinstance(event, RolledBack):
        return replace(state, branch=max(state.branch, event.branch))
    if isinstance(event, TimesMeasured):
        return replace(state, times=event)
    if isinstance(event, ExchangeBroken):
        return _broken(state, event)
    if isinstance(event, GenerationEntered):
        return _entered(state, event.worker_id, event.generation)
    if isinstance(event, HoldExpired):
        return replace(state, holding=0) if state.holding == event.generation else state
    return state


def to_drain(state: JobState, event: DrainRequested) -> tuple[str, ...]:
    """The living workers that ``event`` is about, and that were not to leave already."""
    return tuple(
        view.member.worker_id
        for view in state.having("waiting", "member")
        if (view.member.worker_id == event.worker_id or view.member.host == event.host) and view.draining is None
    )


def preempts(state: JobState, deadline: float | None) -> bool:
    """Whether a wish that the job makes room until ``deadline`` changes anything: it is the first, or has less time."""
    if state.stopping is not None or state.winding_down is not None:
        return False
    current = state.preempting
    if current is None or deadline is None:
        return current is None
    return current.deadline is None or deadline < current.deadline


def _joined(state: JobState, member: Member) -> JobState:
    if state.view(member.worker_id) is not None:
        return state
    gone = state.having(*GONE)
    workers = state.workers
    if len(gone) > _KEPT_GONE:
        forgotten = frozenset(view.member.worker_id for view in gone[: len(gone) - _KEPT_GONE] if view.ended)
        workers = tuple(view for view in workers if view.member.worker_id not in forgotten)
    return replace(state, workers=(*workers, WorkerView(member=member, fresh=True)))


def _changed(state: JobState, worker_id: str, **changes: Any) -> JobState:
    view = state.view(worker_id)
    return state if view is None else replace(state, workers=roster.replaced(state.workers, replace(view, **changes)))


def _gone(state: JobState, worker_id: str, standing: Standing, ended: bool = False) -> JobState:
    view = state.view(worker_id)
    if view is None:
        # It ended before it joined. Remember it, so that the first generation does not wait for it for ever.
        unknown = WorkerView(member=Member(worker_id=worker_id), standing=standing, ended=ended)
        return replace(state, workers=(*state.workers, unknown), absent=state.absent + _counts(state))
    if view.standing in GONE:
        return _changed(state, worker_id, ended=True) if ended and not view.ended else state
    if view.standing == "waiting" and state.generation is None:
        state = replace(state, absent=state.absent + _counts(state))
    return _changed(state, worker_id, standing=standing, ended=ended)


def _counts(state: JobState) -> bool:
    """Whether one that does not come is missed for good: where a job begins again, others come in its place."""
    return not state.restoring


def _left(state: JobState, worker_id: str) -> JobState:
    upcoming = state.upcoming
    if upcoming is not None and upcoming.rank_of(worker_id) is None and state.preempting is None:
        # It left because all were ready for this generation: they enter it at the same step boundary.
        state = _adopt(replace(state, upcoming=None), upcoming)
    return _gone(state, worker_id, "left")


def _broken(state: JobState, event: ExchangeBroken) -> JobState:
    known = {each.number for each in (state.generation, state.upcoming) if each is not None}
    if event.generation not in known:
        return state
    state = replace(state, broken=tuple(sorted({*(set(state.broken) & known), event.generation})))
    if state.generation is None or event.generation != state.generation.number:
        return state
    complaints = {*state.complaints, *((event.worker_id, peer) for peer in event.unreachable)}
    return replace(state, complaints=tuple(sorted(complaints)))


def _entered(state: JobState, worker_id: str, generation: int) -> JobState:
    view = state.view(worker_id)
    if view is not None and generation > view.entered:
        state = _changed(state, worker_id, entered=generation)
    if generation > state.highest:
        state = replace(state, highest=generation)
    if state.upcoming is not None and state.upcoming.number == generation:
        # All enter it at the same step boundary, so one that has is enough to know.
        state = _adopt(replace(state, upcoming=None), state.upcoming)
    if state.recovering and state.generation is not None and state.generation.number == generation:
        views = state.having("member")
        state = replace(state, recovering=any(view.entered < generation for view in views))
    return state


def _adopt(state: JobState, generation: Generation) -> JobState:
    inside = frozenset(generation.worker_ids)

    def standing(view: WorkerView) -> Standing:
        if view.member.worker_id in inside:
            return "member" if view.standing == "waiting" else view.standing
        # Only those who are to leave are left out of a generation alive.
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


def apply(state: JobState, action: AnyAction, nonce: str) -> JobState:
    """Return what is wanted after ``action``; ``nonce`` names the generation that it may make."""
    if isinstance(action, Reconfigure):
        made = _make(state, action.members, nonce)
        retries = state.retries + 1 if action.again else 0
        # What those who meet again found out about each other still holds.
        complaints = state.complaints if action.again else ()
        replacing = state.replacing if action.replacing is None else action.replacing
        state = replace(state, upcoming=None, recovering=False, retries=retries, replacing=replacing)
        adopted = _adopt(state, made)
        return replace(adopted, complaints=complaints)
    if isinstance(action, Propose):
        made = _make(state, action.members, nonce)
        return replace(state, upcoming=made, highest=made.number)
    if isinstance(action, Fence):
        return _gone(state, action.worker_id, "lost")
    if isinstance(action, Release):
        return _gone(state, action.worker_id, "left")
    if isinstance(action, Hold):
        return replace(state, holding=action.generation, upcoming=None)
    if isinstance(action, Restore):
        return begun_again(state, action)
    if isinstance(action, Probe):
        return replace(state, probing=action.generation)
    if isinstance(action, Drain):
        return _changed(state, action.worker_id, draining=action.reason)
    if isinstance(action, WindDown):
        return replace(state, winding_down=state.winding_down or action.reason)
    if isinstance(action, Preempt):
        reason = action.reason if state.preempting is None else state.preempting.reason
        return replace(state, preempting=Preemption(reason=reason, deadline=action.deadline))
    if isinstance(action, TakeCheckpoint):
        number = state.wishes[-1].number + 1 if state.wishes else 1
        return replace(state, wishes=(*state.wishes, CheckpointWish(number=number, tag=action.tag))[-_KEPT_WISHES:])
    if isinstance(action, Stop):
        return state if state.stopping is not None else replace(state, stopping=action)
    # Watch, DeclareLost and RequestDrain change nothing by themselves: events follow from them.
    return state


def _make(state: JobState, worker_ids: Iterable[str], nonce: str) -> Generation:
    number = state.highest + 1
    known = {member.worker_id: member for member in state.generation.members} if state.generation is not None else {}

    def member(worker_id: str) -> Member:
        if worker_id in known:
            return known[worker_id]
        view = state.view(worker_id)
        assert view is not None
        return replace(view.member, since=0 if state.generation is None else number)

    return Generation(number=number, nonce=nonce, members=tuple(map(member, worker_ids)))


def restarted(state: JobState, durable: Generation | None) -> JobState:
    """The state of a lighthouse that begins again with nothing but the generation it last made durable."""
    fresh = JobState(slots=state.slots, min_workers=state.min_workers)
    if durable is None:
        return fresh
    workers = tuple(WorkerView(member=member, standing="member") for member in durable.members)
    return replace(fresh, workers=workers, generation=durable, highest=durable.number, recovering=True)
