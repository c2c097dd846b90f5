"""Checkpoints that somebody asks for."""

from __future__ import annotations

from craft.decide.job.state import JobState
from craft.protocol.actions import AnyAction, TakeCheckpoint
from craft.protocol.events import AnyEvent, CheckpointRequested


class CheckpointPolicy:
    """Has one taken at the next step boundary."""

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if isinstance(event, CheckpointRequested):
            return (TakeCheckpoint(tag=event.tag, reason=event.reason),)
        return ()
