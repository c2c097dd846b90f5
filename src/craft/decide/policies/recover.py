"""A lighthouse that was started again."""

from __future__ import annotations

from craft.decide.job.state import JobState
from craft.protocol.actions import AnyAction, Reconfigure
from craft.protocol.events import AnyEvent, GenerationEntered


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
