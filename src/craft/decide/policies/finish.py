"""Finish a job after its training loop; code after the loop runs again where a worker was lost."""

from __future__ import annotations

from craft.decide.job.state import JobState, LostAfterLoop
from craft.decide.policies.policy import EXIT_FINISHED, EXIT_GIVEN_UP, names, why_no_replacement
from craft.decide.step.topology import seated
from craft.protocol.actions import AnyAction, Hold, Reconfigure, Stop
from craft.protocol.events import (
    AnyEvent,
    GenerationEntered,
    HoldExpired,
    HostLost,
    LoopEnded,
    ReplacementsEnded,
    ScriptEnded,
    WorkerFailed,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)

REPLACEMENT_LIMIT_S = 600.0
"""How long the others wait for a replacement: its script may take minutes to reach the loop."""


class FinishPolicy:
    """Lets a replacement run the code after the loop in place of a worker that was lost there.

    It joins at once: there is no step boundary to wait for. Without a replacement the job ends with a non-zero exit
    code, since what the lost worker did there, such as saving the model, may be missing.
    """

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if state.generation is None:
            return ()
        if isinstance(event, WorkerJoined | GenerationEntered | LoopEnded):
            return self._seat(state)
        if isinstance(event, HoldExpired):
            return self._give_up(state) if self._all_ended(state) else ()
        if isinstance(event, ScriptEnded | WorkerLost | WorkerFailed | WorkerFinished | HostLost | ReplacementsEnded):
            return self._end(state, event)
        return ()

    def _seat(self, state: JobState) -> tuple[AnyAction, ...]:
        """Add replacements to the generation once all members are after their loop."""
        unfinished_scripts = state.unfinished_scripts
        views = state.having("member")
        if not (unfinished_scripts and state.spares) or state.ending or not all(view.after_loop for view in views):
            return ()
        assert state.generation is not None
        came = sum(member.since > unfinished_scripts[0].generation for member in state.generation.members)
        joining = state.spares[: max(0, len(unfinished_scripts) - came)]
        if not joining:
            return ()
        return (
            Reconfigure(
                members=seated(state.members, joining, state.host_of),
                reason=f"{names(joining)} {'runs' if len(joining) == 1 else 'run'} the code after the loop in the place of"
                f" {names([each.worker_id for each in unfinished_scripts])}",
            ),
        )

    def _end(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if not self._all_ended(state):
            return ()
        if not state.unfinished_scripts:
            if state.members or isinstance(event, WorkerFinished):
                # The members hear of it and finish; the last one ends the job.
                return ()
            return (Stop(reason="every script came to its end", exit_code=EXIT_FINISHED),)
        if not state.members:
            return ()
        if state.spares and (seat := self._seat(state)):
            return seat
        if state.ending or not (state.replaceable and all(each.replaceable for each in state.unfinished_scripts)):
            return self._give_up(state)
        if state.holding:
            return ()
        assert state.generation is not None
        return (
            Hold(
                generation=state.generation.number,
                limit_s=REPLACEMENT_LIMIT_S,
                reason="a replacement is waited for, which runs the code after the loop again:"
                f" {_lost(state.unfinished_scripts)}",
            ),
        )

    @staticmethod
    def _all_ended(state: JobState) -> bool:
        """Return whether every script of the current generation ended, or its worker is lost."""
        assert state.generation is not None
        views = (state.view(worker_id) for worker_id in state.members)
        if not all(view is not None and view.script_ended for view in views):
            return False
        former = (state.view(worker_id) for worker_id in state.generation.worker_ids)
        return any(view is not None and view.script_ended for view in former)

    @staticmethod
    def _give_up(state: JobState) -> tuple[AnyAction, ...]:
        if not state.unfinished_scripts:
            return ()
        reason = (
            f"{_lost(state.unfinished_scripts)}{why_no_replacement(state)}: what it did there, such as saving the model,"
            " may be missing."
            " All steps are committed; job.once(name, fn) has the next worker do such work"
        )
        return (Stop(reason=reason, exit_code=EXIT_GIVEN_UP),)


def _lost(unfinished_scripts: tuple[LostAfterLoop, ...]) -> str:
    who = ", ".join(f"{each.worker_id} ({each.reason})" for each in unfinished_scripts)
    return f"{who} {'was' if len(unfinished_scripts) == 1 else 'were'} lost after the last step and before the end of the script"
