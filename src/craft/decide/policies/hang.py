"""Workers that hang."""

from __future__ import annotations

from craft.decide.job.last_copy import STOPPED
from craft.decide.job.state import JobState
from craft.decide.policies.broken import meet_again
from craft.protocol.actions import AnyAction, DeclareLost, Probe
from craft.protocol.events import AnyEvent, WorkerOverdue

EXCHANGING = "exchanging"
CALLING = "calling"
ENDING = "ending"


def waits(phase: str, overdue: str) -> bool:
    """Whether a member in ``phase`` waits for one that is overdue in the phase ``overdue``.

    For one that is in a call, those wait who have gone past it: to the next step, or to the end of the loop.
    """
    return phase in ((EXCHANGING, ENDING) if overdue == CALLING else (EXCHANGING, CALLING))


def is_elsewhere(phase: str, overdue: str) -> bool:
    """Whether a member in ``phase`` is at something else, and may come to where the overdue one is."""
    return not waits(phase, overdue) and not phase == overdue == CALLING


class HangPolicy:
    """Ends whoever holds the others up; where all wait for each other, has them find out whom they cannot reach."""

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if not isinstance(event, WorkerOverdue):
            return ()
        view = state.view(event.worker_id)
        if view is None or view.standing not in ("waiting", "member"):
            return ()
        if event.phase in (EXCHANGING, CALLING):
            return self._exchanging(state, event)
        alone = not event.waiting and not event.elsewhere
        if event.phase != STOPPED and not event.waiting and not alone:
            # Nobody waits for it: all are at something long, such as a validation.
            return ()
        return (DeclareLost(worker_id=event.worker_id, source="watch", reason=event.detail),)

    def _exchanging(self, state: JobState, event: WorkerOverdue) -> tuple[AnyAction, ...]:
        current = state.generation
        if current is None or event.elsewhere or not event.waiting or state.probing == current.number:
            return ()
        if event.phase == CALLING:
            if state.holding or any(view.entered < current.number for view in state.having("member")):
                # Others who wait in the same call said so just before, and all are about to meet.
                return ()
            # Each then says where it stands. If that is not at the same call, all find out.
            return meet_again(
                state, f"every member waits for another, and {event.worker_id} in a call between the steps: all"
            )
        return (Probe(generation=current.number, reason="every member waits in the exchange for another"),)
