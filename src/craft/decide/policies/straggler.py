"""Workers that are slow."""

from __future__ import annotations

from craft.decide.job.observe import observe, to_drain
from craft.decide.job.state import JobState
from craft.decide.policies.drain import DrainPolicy
from craft.protocol.actions import AnyAction
from craft.protocol.events import AnyEvent, DrainRequested, StragglerFound


class StragglerPolicy:
    """Lets a slow worker leave, where that is the answer, as if a person had ordered it. All else workers do by themselves."""

    def __init__(self) -> None:
        self._drain = DrainPolicy()

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if not isinstance(event, StragglerFound) or event.answer != "drain" or state.ending:
            return ()
        view = state.view(event.worker_id)
        if view is None or view.standing != "member":
            return ()
        if len(state.staying) + len(state.spares) - 1 < state.min_workers:
            # Better slow than too few; it keeps the small share that it was given.
            return ()
        reason = f"is slow: a microbatch takes {event.ratio:g} times as long there as elsewhere"
        order = DrainRequested(worker_id=event.worker_id, reason=reason)
        return self._drain.decide(observe(state, order), order) if to_drain(state, order) else ()
