"""Policies: pure functions ``(JobState, Event) -> (Action, ...)``. The first in the list that answers wins.

The state given to a policy has already taken the event in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from craft.decide.membership import JobState
from craft.protocol.actions import AnyAction, Fence, Propose, Reconfigure, Stop, Watch, WindDown
from craft.protocol.events import (
    AnyEvent,
    ExchangeBroken,
    GenerationEntered,
    GenerationStuck,
    HostLost,
    StateDiverged,
    StopRequested,
    WorkerFailed,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from craft.protocol.membership import Member

EXIT_FINISHED = 0
EXIT_BUG = 1
EXIT_BAD_INPUT = 2
EXIT_GIVEN_UP = 3


class Policy(Protocol):
    """Decides what is done about an event."""

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        """Return what to do about ``event``, or () to leave it to the next policy; same inputs, same answer."""


def decide(policies: Sequence[Policy], state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
    """Ask each policy in turn; the first answer counts."""
    if state.stopping is not None:
        return ()
    for policy in policies:
        actions = policy.decide(state, event)
        if actions:
            return actions
    return ()


class StopPolicy:
    """Answers whatever ends the whole job."""

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if isinstance(event, StopRequested):
            if state.generation is None:
                return (Stop(reason=event.reason, exit_code=EXIT_FINISHED),)
            return (WindDown(reason=event.reason),)
        if isinstance(event, StateDiverged):
            return (Stop(reason=f"state diverged: {event.detail}", exit_code=EXIT_BUG),)
        if isinstance(event, WorkerFailed):
            return self._failed(state, event)
        if isinstance(event, WorkerFinished):
            return self._finished(state)
        return ()

    def _failed(self, state: JobState, event: WorkerFailed) -> tuple[AnyAction, ...]:
        """An exception is a fault like any other, unless it is plain that it would come again."""
        if event.step is None:
            reason = f"{event.error} (worker {event.worker_id}, before the first step)"
            return (Stop(reason=reason, exit_code=EXIT_BUG, traceback=event.traceback),)
        again = [
            other
            for other in state.failures
            if other.worker_id != event.worker_id and (other.step, other.microbatch) == (event.step, event.microbatch)
        ]
        where = f"step {event.step}" + ("" if event.microbatch is None else f", microbatch {event.microbatch}")
        if again:
            reason = f"{event.error} ({where} failed on workers {again[0].worker_id} and {event.worker_id})"
            return (Stop(reason=reason, exit_code=EXIT_BUG, traceback=event.traceback),)
        if not state.having("member"):
            reason = f"{event.error} ({where} failed on worker {event.worker_id}, the last one)"
            return (Stop(reason=reason, exit_code=EXIT_BUG, traceback=event.traceback),)
        return ()

    def _finished(self, state: JobState) -> tuple[AnyAction, ...]:
        if state.having("member"):
            return ()
        if state.generation is None and (state.having("waiting") or state.absent < state.slots):
            # Nothing has begun yet: the others, who may not even have joined, can still do the whole job.
            return ()
        reason = f", as asked: {state.winding_down}" if state.winding_down is not None else ""
        return (Stop(reason=f"every worker finished{reason}", exit_code=EXIT_FINISHED),)


class FormPolicy:
    """Makes the first generation, once every expected worker has joined or is known to be lost."""

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if state.generation is not None or not isinstance(
            event, WorkerJoined | WorkerLost | WorkerFailed | WorkerFinished | HostLost
        ):
            return ()
        # In the order of their names, not of their coming: ranks are then what RANK says in a worker's environment.
        members = sorted((view.member for view in state.having("waiting")), key=_by_name)
        waiting = tuple(member.worker_id for member in members)
        missing = state.slots - state.absent - len(waiting)
        if missing > 0:
            return ()
        if len(waiting) < state.min_workers:
            return (Stop(reason=_too_few(len(waiting), state.min_workers), exit_code=EXIT_GIVEN_UP),)
        chosen = waiting[: state.slots]
        return (Reconfigure(members=chosen, reason=f"all {len(chosen)} workers joined"),)


class LossPolicy:
    """Answers a loss with a generation of the survivors, who redo (or drop) what was lost."""

    def __init__(self, on_loss: str = "redo") -> None:
        self._then = "drop" if on_loss == "shrink" else "redo"

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if state.generation is None or not isinstance(event, WorkerLost | WorkerFailed | HostLost | WorkerFinished):
            return ()
        if isinstance(event, WorkerFinished) and event.complete and _has_entered(state, event.worker_id):
            # It committed every step, so everyone has, or has in hand, all there is; nobody needs it any more.
            # Unless it ended before this generation reached it: then the others wait there for its claim.
            return ()
        present = state.generation.worker_ids
        upcoming = state.upcoming.worker_ids if state.upcoming is not None else ()
        gone = _subjects(state, event)
        if not any(worker_id in present or worker_id in upcoming for worker_id in gone):
            return ()
        survivors = state.members
        fences: tuple[AnyAction, ...] = ()
        if isinstance(event, WorkerLost) and event.source != "agent":
            # Its agent did not see it die, so it may live: it must not act under the old generation.
            fences = (Fence(worker_id=event.worker_id, reason=f"{event.reason}: it may still be running"),)
        if not survivors and state.having("finished"):
            return (*fences, Stop(reason="every worker that is left finished", exit_code=EXIT_FINISHED))
        # Once some have finished, the few that are left are only completing what everybody already has in hand.
        if not survivors or (len(survivors) < state.min_workers and not state.having("finished")):
            return (*fences, Stop(reason=_too_few(len(survivors), state.min_workers), exit_code=EXIT_GIVEN_UP))
        reason = f"{_names(gone)} {_verb(event)}: {len(survivors)} survivors {self._then} its microbatches"
        if isinstance(event, WorkerFinished) and event.complete:
            reason = f"{_names(gone)} finished before it heard of generation {state.generation.number}"
        return (*fences, Reconfigure(members=survivors, reason=reason))


class JoinPolicy:
    """Proposes a generation with whoever waits for a free slot."""

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if state.generation is None or state.recovering or not isinstance(event, WorkerJoined | GenerationEntered):
            return ()
        waiting = [view.member.worker_id for view in state.having("waiting")]
        free = state.slots - len(state.members)
        if not waiting or free <= 0:
            return ()
        if state.upcoming is not None:
            # Its members may be entering it just now; were it replaced, nobody would know under what they act.
            return ()
        if any(view.entered < state.generation.number for view in state.having("member")):
            # A generation is prepared only from one that everybody is in; GenerationEntered asks again.
            return ()
        members = (*state.members, *waiting[:free])
        return (Propose(members=members, reason=f"{_names(tuple(waiting[:free]))} joins at the next step boundary"),)


class BrokenPolicy:
    """Answers a broken exchange that no death explains: the same members meet again."""

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        current = state.generation
        if current is None:
            return ()
        if isinstance(event, ExchangeBroken) and event.generation == current.number:
            return (Watch(generation=current.number, reason="a death would show within moments"),)
        if isinstance(event, GenerationStuck) and event.generation == current.number and state.members:
            reason = (
                f"generation {event.generation} broke though nobody is known to be lost: the same members meet again"
            )
            return (Reconfigure(members=state.members, reason=reason),)
        return ()


class RecoverPolicy:
    """After a restart of the lighthouse: adopt the running generation, or go past it."""

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        current = state.generation
        if not state.recovering or current is None or not isinstance(event, GenerationEntered):
            return ()
        if event.generation > current.number:
            # Somebody was told of a generation that this lighthouse does not know: go past it.
            reason = f"generation {event.generation} is running, which the restarted lighthouse did not know"
            return (Reconfigure(members=state.members, reason=reason),)
        return ()


def default_policies(on_loss: str = "redo") -> tuple[Policy, ...]:
    """The built-in policies, in the order in which they are asked."""
    return (StopPolicy(), FormPolicy(), LossPolicy(on_loss), RecoverPolicy(), BrokenPolicy(), JoinPolicy())


def _by_name(member: Member) -> tuple[str, int, str]:
    """w10 comes after w9."""
    return member.host, len(member.worker_id), member.worker_id


def _subjects(state: JobState, event: AnyEvent) -> tuple[str, ...]:
    if isinstance(event, HostLost):
        return tuple(view.member.worker_id for view in state.workers if view.member.host == event.host)
    if isinstance(event, WorkerLost | WorkerFailed | WorkerFinished):
        return (event.worker_id,)
    return ()


def _has_entered(state: JobState, worker_id: str) -> bool:
    """Whether it is known to act under the current generation."""
    view = state.view(worker_id)
    return state.generation is not None and view is not None and view.entered >= state.generation.number


def _verb(event: AnyEvent) -> str:
    if isinstance(event, WorkerFailed):
        return f"failed ({event.error})"
    if isinstance(event, WorkerFinished):
        return "left before the end"
    return f"lost ({event.reason})" if isinstance(event, WorkerLost | HostLost) else "lost"


def _names(worker_ids: tuple[str, ...]) -> str:
    return ", ".join(worker_ids)


def _too_few(num_workers: int, min_workers: int) -> str:
    if num_workers == 0:
        return "no worker is left"
    return f"{num_workers} workers are left and --min-workers is {min_workers}"
