"""Restore a job from a checkpoint when every copy of the training state is lost."""

from __future__ import annotations

from craft.decide.job.apply import apply
from craft.decide.job.restoration import (
    Basis,
    RestoreSettings,
    basis,
    cannot_commit,
    made_no_progress,
    may_have_state,
    may_still_run,
)
from craft.decide.job.state import JobState
from craft.decide.policies.loss import STATE_LOST, fences, is_loss
from craft.decide.policies.membership import in_order
from craft.decide.policies.policy import EXIT_GIVEN_UP, names, not_enough, too_few, why_no_replacement
from craft.protocol.actions import AnyAction, Reconfigure, Restore, Stop
from craft.protocol.events import (
    AnyEvent,
    ArrivalsEnded,
    HoldExpired,
    HostLost,
    ReplacementsEnded,
    StateGone,
    WorkerEnded,
    WorkerFailed,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)


class RestorePolicy:
    """Restores a job that lost every copy of the training state, and makes its first generation.

    Its members are waiting workers and replacements. All load the same checkpoint, as at the start of a job with
    ``--resume``. It is asked before ``LossPolicy``, which would give the job up.
    """

    def __init__(self, settings: RestoreSettings | None = None) -> None:
        self._settings = settings or RestoreSettings()

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if state.restoring:
            return self._while_restoring(state, event)
        if state.generation is None or state.ending or state.having("finished"):
            return ()
        if isinstance(event, StateGone):
            return self._begin_again(state, STATE_LOST) if event.generation == state.generation.number else ()
        if not is_loss(state, event) or may_have_state(state):
            return ()
        # Only workers that were to receive the state are left: they would find out that none has it. At a position of a replica
        # all that could have it are gone.
        actions = self._begin_again(state, _state_lost(state) if state.members else too_few(0, state.min_workers))
        sharded = state.replica_size > 1
        certain = not state.members or sharded or any(isinstance(action, Restore) for action in actions)
        return (*fences(event), *actions) if actions and certain else ()

    def _begin_again(self, state: JobState, why: str) -> tuple[AnyAction, ...]:
        """Restore from the newest checkpoint; stop without one; () if too few workers could join."""
        if not state.replaceable and not state.is_enough(state.fitting((), state.spares)):
            return ()
        found = basis(state)
        if found is None:
            reason = f"{why}, and there is no checkpoint to begin again from: {_hint(state)}"
            return (Stop(reason=reason, exit_code=EXIT_GIVEN_UP),)
        if (
            made_no_progress(state, found.checkpoint)
            and state.restoration
            and state.restoration.tries >= self._settings.tries
        ):
            return (Stop(reason=f"{why}: {_vain(state, found)}", exit_code=EXIT_GIVEN_UP),)
        restore = Restore(
            branch=state.branch + 1,
            checkpoint=found.checkpoint,
            step=found.step,
            limit_s=self._settings.limit_s,
            reason=f"{why}: {_from(state, found)}",
        )
        # Spares may be waiting already.
        return (restore, *self._formed(apply(state, restore, nonce=""), expired=False))

    def _while_restoring(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        expired = isinstance(event, HoldExpired)
        if isinstance(event, HoldExpired) and state.restoration and event.generation != state.restoration.after:
            return ()
        ended = isinstance(event, ArrivalsEnded)
        if (
            expired
            or ended
            or isinstance(
                event,
                WorkerJoined | WorkerLost | WorkerEnded | WorkerFailed | WorkerFinished | HostLost | ReplacementsEnded,
            )
        ):
            return self._formed(state, expired, ended)
        return ()

    def _formed(self, state: JobState, expired: bool, ended: bool = False) -> tuple[AnyAction, ...]:
        """Make the first generation if enough workers wait and no former member can train beside it.

        ``ended``: no other worker is on the way, so those that wait are enough.
        """
        running = may_still_run(state)
        if running and not expired:
            return ()
        if running and not cannot_commit(state):
            reason = f"{names(running)} may still be at work, where nobody reaches them: a second course must not begin"
            return (Stop(reason=reason, exit_code=EXIT_GIVEN_UP),)
        waiting = in_order(state)
        over = expired or not state.replaceable
        least = max(1, state.min_workers)
        chosen = state.fitting((), waiting)
        if len(chosen) >= (least if over or ended else max(least, _expected(state))) and state.can_compute(chosen):
            reason = f"{len(chosen)} workers begin again" if len(chosen) > 1 else "1 worker begins again"
            reason += ": nobody else is on the way" if ended else ""
            return (Reconfigure(members=chosen, reason=reason),)
        if not over:
            return ()
        when = f" within {self._settings.limit_s:g} s" if expired else ""
        came = f"not enough came to begin again{when}"
        reason = f"{not_enough(state, waiting)}: {came}{why_no_replacement(state)}"
        return (Stop(reason=reason, exit_code=EXIT_GIVEN_UP),)


def _state_lost(state: JobState) -> str:
    """Return what is lost, in words: where the model is sharded, the positions without a live worker."""
    missing = sorted(set(range(state.replica_size)).difference(map(state.position_of, state.members)))
    if not missing or state.replica_size == 1:
        return STATE_LOST
    where = f"position {missing[0]}" if len(missing) == 1 else f"positions {', '.join(map(str, missing))}"
    return f"every worker that had the training state of {where} is lost"


def _expected(state: JobState) -> int:
    """Return how many workers will join: without those that left, of silent hosts, or of hosts without restarts."""
    here = {view.member.host for view in state.having("waiting")}
    away = [view.member.host for view in state.having("lost") if not view.ended and view.member.host not in here]
    left = {view.member.worker_id for view in state.having("left")}
    former = state.former.members if state.former is not None else ()
    stay = [member for member in former if member.host not in away and member.worker_id not in left]
    unreplaced = [member for member in stay if member.host in dict(state.unreplaced)]
    return state.slots - len(away) - len(unreplaced) - state.left


def _place(found: Basis) -> str:
    return "the very beginning" if found.checkpoint is None else f"the checkpoint of step {found.step}"


def _from(state: JobState, found: Basis) -> str:
    steps = max(0, (state.reached or 0) - found.step)
    # From their last reports: they may have got further.
    again = f"at least {steps} steps are computed once more" if steps != 1 else "at least 1 step is computed once more"
    if not steps:
        known = "nothing is known to have been committed beyond it"
        again = "what came after it is computed once more" if state.reached is None else known
    return f"begins again from {_place(found)}, {again}"


def _vain(state: JobState, found: Basis) -> str:
    assert state.restoration is not None
    times, furthest = state.restoration.tries, state.restoration.furthest
    last = f"; the last error was: {state.failures[-1].error}" if state.failures else ""
    came = (
        f"came no further than before, to step {furthest}" if furthest > found.step else "committed nothing beyond it"
    )
    return f"the job began {times} times from {_place(found)} and {came}{last}"


def _hint(state: JobState) -> str:
    """Return what would have helped: CRAFT itself saves nothing of external workers."""
    if state.generation is not None and all(member.guest for member in state.generation.members):
        return "from one that guest.saved() had told of the job would have gone on"
    return "with --checkpoints the job would have gone on by itself"
