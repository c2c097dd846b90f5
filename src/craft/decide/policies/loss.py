"""Answer the loss of workers."""

from __future__ import annotations

from craft.decide.job.loss_costs import CheapestAnswer, CostSettings, choose
from craft.decide.job.pairing import num_complete
from craft.decide.job.positions import spare_moves
from craft.decide.job.state import JobState
from craft.decide.policies.policy import (
    EXIT_FINISHED,
    EXIT_GIVEN_UP,
    names,
    placed_names,
    subjects,
    too_few,
    why_no_replacement,
)
from craft.decide.step.settle import LossAnswer
from craft.decide.step.topology import seated
from craft.protocol.actions import AnyAction, Fence, Hold, Reconfigure, Stop
from craft.protocol.events import (
    AnyEvent,
    HoldExpired,
    HostLost,
    ReplacementsEnded,
    StateGone,
    WorkerFailed,
    WorkerFinished,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)

STATE_LOST = "every worker that had the training state is lost"


class LossPolicy:
    """Answers a loss with a generation of the survivors, and of spares in the lost slots.

    Under ``wait``, or with too few survivors, it holds until replacements join, up to a limit. Under ``auto`` free slots
    are filled only where that costs less than going on without (``job/loss_costs``).
    """

    def __init__(
        self, on_loss: LossAnswer = "redo", wait_limit_s: float = 60.0, costs: CostSettings | None = None
    ) -> None:
        self._on_loss = on_loss
        self._wait_limit_s = wait_limit_s
        self._costs = costs

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if state.generation is None:
            return ()
        if isinstance(event, WorkerJoined | HoldExpired | ReplacementsEnded):
            return self._held(state, event)
        if isinstance(event, StateGone):
            return self._stateless(state, event)
        if not is_loss(state, event):
            return ()
        return (*fences(event), *self._answer(state, event, subjects(state, event)))

    @staticmethod
    def _stateless(state: JobState, event: StateGone) -> tuple[AnyAction, ...]:
        """Stop: all members left were to receive the state from others that are gone."""
        assert state.generation is not None
        if event.generation != state.generation.number:
            return ()
        if state.having("finished"):
            return (Stop(reason="every worker that is left finished", exit_code=EXIT_FINISHED),)
        return (Stop(reason=f"{STATE_LOST}{why_no_replacement(state)}", exit_code=EXIT_GIVEN_UP),)

    def _answer(self, state: JobState, event: AnyEvent, gone: tuple[str, ...]) -> tuple[AnyAction, ...]:
        assert state.generation is not None
        survivors = state.members
        if not survivors and state.having("finished"):
            return (Stop(reason="every worker that is left finished", exit_code=EXIT_FINISHED),)
        if not survivors:
            return (_too_few(state, 0),)
        if isinstance(event, WorkerFinished) and event.complete:
            reason = f"{names(gone)} finished before it heard of generation {state.generation.number}"
            return (Reconfigure(members=survivors, reason=reason),)
        # After the first finish, the others only complete results that all have in hand. A preempted job needs one more
        # step boundary, and no worker is started for that.
        ending = bool(state.having("finished")) or state.preempting is not None
        choice = self._choice(state) if not ending else None
        filled = survivors if ending or (choice is not None and choice.answer == "redo") else _filled(state)
        what = f"{placed_names(state, gone)} {_verb(state, event)}"
        wanted = self._wanted(state)
        enough = len(filled) >= wanted and state.can_compute(filled)
        moves = () if ending else spare_moves(state)
        if not enough and (state.replaceable or moves) and not ending and state.winding_down is None:
            reason = f"{what}: {len(survivors)} of {wanted} wanted workers are left, a replacement is waited for"
            return (Hold(generation=state.generation.number, limit_s=self._wait_limit_s, reason=reason), *moves)
        if (len(filled) < state.min_workers or not state.can_compute(filled)) and not ending:
            return (_too_few(state, len(filled)),)
        why = "" if choice is None else f"; {choice.reason}"
        replacing = None if choice is None else choice.answer != "redo"
        return (Reconfigure(members=filled, replacing=replacing, reason=f"{what}: {self._course(state, filled)}{why}"),)

    def _wanted(self, state: JobState) -> int:
        """Return how many members the job needs to go on: under ``wait``, as many as possible.

        A worker that left on request, or whose host starts no more workers, gets no replacement.
        """
        if self._on_loss != "wait":
            return state.min_workers
        return max(state.min_workers, min(state.slots, len(state.members) + _replaced(state)))

    def _choice(self, state: JobState) -> CheapestAnswer | None:
        """Return the cheapest answer under ``auto``; None if there is no choice: no fewer workers are allowed."""
        survivors = len(state.members)
        if self._on_loss != "auto" or state.times is None or not state.min_workers <= survivors < state.slots:
            return None
        spares = len(state.spares)
        if state.replica_size > 1:
            # Workers of a replica that is short compute nothing, and a spare of another position takes as long as a restart.
            survivors = num_complete(state.slots_of(state.members), state.replica_size) * state.replica_size
            spares = len(state.fitting(state.members))
        if not survivors:
            return None
        return choose(state.times, survivors=survivors, slots=state.slots, spares=spares, settings=self._costs)

    def _course(self, state: JobState, filled: tuple[str, ...]) -> str:
        taken = _taking(state, filled)
        then = self._survivors(state)
        if not taken:
            return then
        if self._on_loss == "wait" and state.replica_size == 1:
            return f"{names(taken)} {_take(taken)} and {'computes' if len(taken) == 1 else 'compute'} its microbatches"
        return f"{names(taken)} {_take(taken)}, {then}"

    def _survivors(self, state: JobState) -> str:
        """Return what the survivors do, in words."""
        number = len(state.members)
        if all(view.after_loop for view in state.having("member")):
            return "its code after the loop is to be run again"
        if all(view.member.guest for view in state.having("member")):
            return "1 survivor is told" if number == 1 else f"{number} survivors are told"
        one, several = ("drops", "drop") if self._on_loss == "shrink" else ("redoes", "redo")
        who = f"1 survivor {one}" if number == 1 else f"{number} survivors {several}"
        return f"{who} its microbatches"

    def _held(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        """End the hold if enough replacements joined, or none will."""
        if isinstance(event, HoldExpired):
            if state.generation is None or state.generation.number != event.generation:
                return ()
        elif not state.holding:
            return ()
        expired = isinstance(event, HoldExpired)
        filled = _filled(state)
        taken = _taking(state, filled)
        enough = len(filled) >= self._wanted(state) and state.can_compute(filled)
        if enough and taken:
            return (Reconfigure(members=filled, reason=f"{names(taken)} took the place of those lost"),)
        if not (enough or expired) and (state.replaceable or state.moving or spare_moves(state)):
            return spare_moves(state)
        if len(filled) < state.min_workers or not state.members or not state.can_compute(filled):
            return (_too_few(state, len(filled)),)
        why = f"nobody came within {self._wait_limit_s:g} s" if expired else "nobody will come"
        who = "1 worker redoes" if len(filled) == 1 else f"{len(filled)} workers redo"
        return (Reconfigure(members=filled, reason=f"{why}: {who} the lost microbatches"),)


def is_loss(state: JobState, event: AnyEvent) -> bool:
    """Return whether a member of the current or upcoming generation is gone."""
    if state.generation is None or _is_done(state, event):
        return False
    if not isinstance(event, WorkerLost | WorkerFailed | HostLost | WorkerFinished | WorkerLeft):
        return False
    present = state.generation.worker_ids
    upcoming = state.upcoming.worker_ids if state.upcoming is not None else ()
    return any(
        (worker_id in present or worker_id in upcoming) and (not _script_ended(state, worker_id) or _are_stuck(state))
        for worker_id in subjects(state, event)
    )


def _script_ended(state: JobState, worker_id: str) -> bool:
    """Return whether a worker ran its script to the end and only waited for the others."""
    view = state.view(worker_id)
    return view is not None and view.script_ended


def _are_stuck(state: JobState) -> bool:
    """Return whether the current generation broke before all its remaining scripts ended."""
    assert state.generation is not None
    broken = state.generation.number in state.broken
    return broken and not all(_script_ended(state, worker_id) for worker_id in state.members)


def fences(event: AnyEvent) -> tuple[AnyAction, ...]:
    """Fence a worker whose death no agent saw: it may still run, and must not act under the old generation."""
    if isinstance(event, WorkerLost) and event.source != "agent":
        return (Fence(worker_id=event.worker_id, reason=f"{event.reason}: it may still be running"),)
    return ()


def _is_done(state: JobState, event: AnyEvent) -> bool:
    """Return whether the worker that ended is no longer needed."""
    if not isinstance(event, WorkerFinished | WorkerLeft):
        return False
    # It committed every step, so all have them or hold the results; or all that it committed is saved. Not if it ended
    # before it entered this generation: then the others wait for its claim.
    complete = isinstance(event, WorkerFinished) and event.complete
    saved = state.preempting is not None and state.checkpoint is not None and state.checkpoint.step >= event.step
    return (complete or saved) and _has_entered(state, event.worker_id)


def _too_few(state: JobState, number: int) -> Stop:
    return Stop(reason=f"{too_few(number, state.min_workers)}{why_no_replacement(state)}", exit_code=EXIT_GIVEN_UP)


def _take(taken: tuple[str, ...]) -> str:
    return "takes the slot" if len(taken) == 1 else "take the slots"


def _filled(state: JobState) -> tuple[str, ...]:
    """Return the survivors, with spares in the free slots."""
    return seated(state.members, state.fitting(state.members), state.host_of)


def _replaced(state: JobState) -> int:
    """Return how many lost members of the current generation have hosts that can start replacements."""
    members = state.generation.members if state.generation is not None else ()
    exhausted = dict(state.unreplaced)
    views = (state.view(member.worker_id) for member in members if member.host not in exhausted)
    return sum(view is None or view.standing == "lost" for view in views)


def _taking(state: JobState, filled: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of ``filled`` that take a free slot."""
    before = frozenset(state.members)
    return tuple(worker_id for worker_id in filled if worker_id not in before)


def _has_entered(state: JobState, worker_id: str) -> bool:
    """Return whether it is known to act under the current generation."""
    view = state.view(worker_id)
    return state.generation is not None and view is not None and view.entered >= state.generation.number


def _verb(state: JobState, event: AnyEvent) -> str:
    if isinstance(event, WorkerFailed):
        return f"failed ({event.error})"
    if isinstance(event, WorkerFinished | WorkerLeft) and state.preempting and _has_entered(state, event.worker_id):
        return "left before all that it has was saved"
    if isinstance(event, WorkerFinished):
        return "left before the end"
    if isinstance(event, WorkerLeft):
        return "left as it was told, before it heard of this generation"
    return f"lost ({event.reason})" if isinstance(event, WorkerLost | HostLost) else "lost"
