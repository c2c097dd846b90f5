"""Workers that hang."""

from __future__ import annotations

from craft.decide.membership import JobState
from craft.protocol.actions import AnyAction, DeclareLost, Probe
from craft.protocol.events import AnyEvent, WorkerOverdue

STOPPED = "stopped"
EXCHANGING = "exchanging"


class HangPolicy:
    """Ends whoever holds the others up; where all wait for each other, has them find out whom they cannot reach."""

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if not isinstance(event, WorkerOverdue):
            return ()
        view = state.view(event.worker_id)
        if view is None or view.standing not in ("waiting", "member"):
            return ()
        if event.phase == EXCHANGING:
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
        return (Probe(generation=current.number, reason="every member waits in the exchange for another"),)
