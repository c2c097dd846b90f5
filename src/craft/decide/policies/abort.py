"""Workers that are to come out of whatever they are blocked in."""

from __future__ import annotations

from craft.decide.job.state import JobState
from craft.protocol.actions import AnyAction, Reconfigure
from craft.protocol.events import AbortRequested, AnyEvent


class AbortPolicy:
    """Has the same members meet in a new generation: each aborts the group that it is in, from its channel thread."""

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if not isinstance(event, AbortRequested) or state.generation is None or state.holding or not state.members:
            return ()
        reason = f"{event.reason}: all members abort generation {state.generation.number} and meet again"
        return (Reconfigure(members=state.members, reason=reason),)
