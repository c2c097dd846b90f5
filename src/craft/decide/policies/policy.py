"""The role ``Policy``, and phrases that several policies use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import UNSET

from craft.decide.job.last_copy import keep_last_copy
from craft.decide.job.state import JobState
from craft.protocol.actions import AnyAction
from craft.protocol.events import AnyEvent, HostLost, WorkerFailed, WorkerFinished, WorkerLeft, WorkerLost

EXIT_FINISHED = 0
EXIT_BUG = 1
EXIT_BAD_INPUT = 2
EXIT_GIVEN_UP = 3
EXIT_PREEMPTED = 75


class Policy(Protocol):
    """Decides how to answer an event."""

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        """Return what to do about ``event``, or () to leave it to the next policy; same inputs, same answer.

        ``state`` has already taken the event in.
        """


def decide(policies: Sequence[Policy], state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
    """Ask each policy in turn; the first answer counts."""
    if state.stopping is not None:
        return ()
    for policy in policies:
        actions = policy.decide(state, event)
        if actions:
            return keep_last_copy(state, event, actions)
    return ()


def subjects(state: JobState, event: AnyEvent) -> tuple[str, ...]:
    """Return the workers that an event is about."""
    if isinstance(event, HostLost):
        return tuple(view.member.worker_id for view in state.workers if view.member.host == event.host)
    if isinstance(event, WorkerLost | WorkerFailed | WorkerFinished | WorkerLeft):
        return (event.worker_id,)
    return ()


def names(worker_ids: Sequence[str]) -> str:
    return ", ".join(worker_ids)


def placed_names(state: JobState, worker_ids: Sequence[str]) -> str:
    """Return the names of workers, with replica and position where the model is sharded."""
    members = state.generation.members if state.generation is not None else ()
    slots = {each.worker_id: each.slot for each in members if each.slot is not UNSET}
    return names(
        [
            f"{each} (replica {slots[each].replica}, position {slots[each].position})" if each in slots else each
            for each in worker_ids
        ]
    )


def too_few(num_workers: int, min_workers: int) -> str:
    if num_workers == 0:
        return "no worker is left"
    left = "1 worker is left" if num_workers == 1 else f"{num_workers} workers are left"
    return f"{left} and --min-workers is {min_workers}"


def not_enough(state: JobState, worker_ids: Sequence[str]) -> str:
    """Return why the job cannot go on with these workers: too few, or none at some position."""
    if state.replica_size == 1 or len(worker_ids) < max(1, state.min_workers):
        return too_few(len(worker_ids), state.min_workers)
    missing = sorted(set(range(state.replica_size)).difference(map(state.position_of, worker_ids)))
    left = "1 worker is left" if len(worker_ids) == 1 else f"{len(worker_ids)} workers are left"
    where = f"position {missing[0]}" if len(missing) == 1 else f"positions {names([str(each) for each in missing])}"
    return f"{left}, none of them at {where} of a replica of {state.replica_size}"


def why_no_replacement(state: JobState) -> str:
    """Return why no replacement comes, as the end of a sentence; empty if one may come."""
    if state.replaceable or state.ending or not state.unreplaced:
        return ""
    reasons = dict.fromkeys(reason for _, reason in state.unreplaced)
    return f", and no host starts workers any more: {'; '.join(reasons)}"
