"""Decide who is a member: the first generation, joins and leaves at step boundaries, a restarted lighthouse."""

from __future__ import annotations

from collections.abc import Sequence

from craft.decide.job.last_copy import holders
from craft.decide.job.pairing import num_complete
from craft.decide.job.positions import spare_moves
from craft.decide.job.state import JobState
from craft.decide.policies.policy import EXIT_GIVEN_UP, names, not_enough
from craft.decide.step.topology import seated
from craft.protocol.actions import AnyAction, Propose, Reconfigure, Stop
from craft.protocol.events import (
    AnyEvent,
    DrainRequested,
    GenerationEntered,
    HostLost,
    ReplacementsEnded,
    WorkerCaughtUp,
    WorkerFailed,
    WorkerFinished,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)
from craft.protocol.membership import Member


class FormPolicy:
    """Makes the first generation once every expected worker has joined or is lost.

    Where the model is sharded, it waits for the replacement of a worker without which no replica is complete.
    """

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if state.generation is not None or state.restoring:
            return ()
        if isinstance(event, ReplacementsEnded):
            if state.replica_size == 1:
                return ()
        elif not isinstance(event, WorkerJoined | WorkerLost | WorkerFailed | WorkerFinished | WorkerLeft | HostLost):
            return ()
        if len(state.having("waiting")) < state.slots - state.absent:
            return ()
        # Spares replace workers that never come, not those that take longer.
        if sum(not view.member.late for view in state.having("waiting")) < state.slots - state.absent:
            return ()
        chosen = state.fitting((), in_order(state))
        if not state.is_enough(chosen):
            if state.replica_size > 1 and state.replaceable:
                return ()
            return (Stop(reason=not_enough(state, chosen), exit_code=EXIT_GIVEN_UP),)
        reason = f"all {len(chosen)} workers joined" if len(chosen) > 1 else "the only worker joined"
        return (Reconfigure(members=chosen, reason=f"{reason}{as_replicas(state, chosen)}"),)


def as_replicas(state: JobState, worker_ids: Sequence[str]) -> str:
    """Return how many replicas these workers are, as the end of a sentence; empty where each is one."""
    if state.replica_size == 1:
        return ""
    number = num_complete(state.slots_of(worker_ids), state.replica_size)
    return f": {number} {'replica' if number == 1 else 'replicas'} of {state.replica_size}"


def in_order(state: JobState) -> tuple[str, ...]:
    """Return the waiting workers in the order of their ranks: by name, so that ranks equal RANK; late ones last."""
    return tuple(member.worker_id for member in sorted((view.member for view in state.having("waiting")), key=_by_name))


def _by_name(member: Member) -> tuple[bool, str, int, str]:
    """Sort w10 after w9."""
    return member.late, member.host, len(member.worker_id), member.worker_id


class JoinPolicy:
    """Proposes a generation with workers that wait for a free slot, and without draining ones."""

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if isinstance(event, WorkerJoined | GenerationEntered | DrainRequested):
            return proposed(state)
        # A spare at another position may be needed now, or a member that drains has a twin with its state.
        sharded = state.replica_size > 1 and isinstance(event, ReplacementsEnded | WorkerCaughtUp | WorkerLost)
        return proposed(state) if sharded else ()


def proposed(state: JobState) -> tuple[AnyAction, ...]:
    """Propose the generation for the next step boundary; () if it is the current one."""
    if state.generation is None or state.recovering or state.holding or state.ending:
        return ()
    if state.upcoming is not None:
        # Its members may be entering it now; if it were replaced, their generation would be unknown.
        return ()
    if not state.having("waiting") and not state.roster.has_leaving_members():
        # The usual case, checked fast: thousands of workers enter a generation within moments.
        return ()
    if any(view.entered < state.generation.number for view in state.having("member")):
        # The next generation is prepared only once all are in this one; GenerationEntered asks again.
        return ()
    staying = state.staying
    kept = frozenset(staying)
    leaving = tuple(worker_id for worker_id in state.members if worker_id not in kept)
    # Free slots stay empty where filling them costs more than it saves.
    joining = state.fitting(staying) if state.replacing else ()
    moves = spare_moves(state)
    kept_on = _kept_on(state, staying, leaving)
    if kept_on:
        # One member with the state must stay until another one has it.
        staying = tuple(each for each in state.members if each in kept or each in kept_on)
        leaving = tuple(each for each in leaving if each not in kept_on)
    wanted = seated(staying, joining, state.host_of)
    if not (joining or leaving) or (leaving and len(wanted) < state.min_workers):
        return moves
    parts = [f"{names(joining)} {'joins' if len(joining) == 1 else 'join'}"] if joining else []
    parts += [f"{names(leaving)} {'leaves' if len(leaving) == 1 else 'leave'}"] if leaving else []
    return (Propose(members=wanted, reason=f"{' and '.join(parts)} at the next step boundary"), *moves)


def _kept_on(state: JobState, staying: Sequence[str], leaving: Sequence[str]) -> frozenset[str]:
    """Return those of ``leaving`` that stay for now: no other member has the state of their position, or a spare comes for it."""
    if state.replica_size == 1:
        return frozenset(leaving) if not staying else frozenset()
    known = holders(state)
    there = {state.position_of(each) for each in staying if each in known}
    coming = {position for _, position in state.moving}.union(each.position for each in spare_moves(state))
    positions = frozenset(range(state.replica_size)).difference(there).union(coming)
    return frozenset(each for each in leaving if state.position_of(each) in positions)


class RecoverPolicy:
    """After a restart of the lighthouse: adopts the running generation, or supersedes it."""

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        current = state.generation
        if not state.recovering or current is None or not isinstance(event, GenerationEntered):
            return ()
        if event.generation > current.number:
            # A worker knows a generation that this lighthouse does not: supersede it.
            reason = f"generation {event.generation} is running, which the restarted lighthouse did not know"
            return (Reconfigure(members=state.members, reason=reason),)
        return ()
