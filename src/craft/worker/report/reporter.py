"""What this worker has to say: to the lighthouse, through its agent, and to the script, through the handlers of ``job.on``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from craft.protocol.errors import BitsDiffer, GroupError
from craft.protocol.events import (
    AnyNote,
    Event,
    GenerationEntered,
    ParametersUnequal,
    StateDiverged,
    StepRetried,
    WorkerLost,
    WorkerPaused,
)
from craft.protocol.membership import DROPPED, Settlement
from craft.worker.membership.client import MembershipClient
from craft.worker.report.channel import Channel
from craft.worker.report.event_outbox import EventOutbox


class Reporter:
    """``report`` and what broke may be said by any thread; what the script hears is said on the main thread only."""

    def __init__(
        self, worker_id: str, membership: MembershipClient, channel: Channel | None, emit: Callable[[Event], None]
    ) -> None:
        self._worker_id = worker_id
        self._membership = membership
        self._channel = channel
        self.emit = emit
        """Tells the script."""
        self._notes = EventOutbox(self.report)

    @property
    def is_heard(self) -> bool:
        """Whether there is anybody to report to: not outside of ``craft run``."""
        return self._channel is not None

    def report(self, *, urgent: bool = True, **changes: Any) -> None:
        """Change what the lighthouse knows of this worker."""
        if self._channel is not None:
            self._channel.report(urgent=urgent, **changes)

    def settled(self, settlement: Settlement, generation: int) -> StepRetried | None:
        """A generation is settled: tell the lighthouse, and return what was lost by it, if anything was."""
        dropped = tuple(index for index, owner in enumerate(settlement.owners) if owner == DROPPED)
        changes: dict[str, Any] = {"generation": generation, "broken": None, "progress": self._membership.progress}
        retried = None
        if settlement.given or dropped:
            retried = StepRetried(generation=generation, step=settlement.step, given=settlement.given, dropped=dropped)
            changes["retried"] = retried
        self.report(**changes)
        return retried

    def entered(self, settlement: Settlement, generation: int, lost: tuple[str, ...]) -> None:
        """The same, and tell the script, too."""
        retried = self.settled(settlement, generation)
        if retried is not None:
            self.emit(retried)
        for worker_id in lost:
            self.emit(WorkerLost(worker_id=worker_id, reason=f"not in generation {generation}", source="peers"))
        self.emit(GenerationEntered(worker_id=self._worker_id, generation=generation))

    def note(self, event: AnyNote) -> None:
        """Tell of something, for the journal; any thread may."""
        self._notes.add(event)

    def paused(self, reason: str, seconds: float) -> None:
        """This worker was paused for so long, until now."""
        self.note(
            WorkerPaused(
                worker_id=self._worker_id, reason=reason, seconds=round(seconds, 3), time=round(time.time(), 6)
            )
        )

    def unwritten(self, trouble: str) -> None:
        """What is written down of this worker cannot be, and why; or all can be again."""
        self.report(unwritten=trouble)

    def unequal(self, found: ParametersUnequal) -> None:
        self.report(unequal=found)

    def broke(self, generation: int, error: GroupError) -> None:
        """Report at once that the group broke; the exchange thread calls this too, as the main thread may compute for long."""
        self._membership.broke(generation, error)

    def diverged(self, error: BitsDiffer, step: int, members: tuple[str, ...]) -> None:
        """Every worker says it before it raises ``error``: it ends the job."""
        self.report(diverged=StateDiverged(step=step, detail=str(error), worker_ids=members))

    def state_lost(self, generation: int) -> None:
        """Every member of ``generation`` says it: there is nothing to go on from."""
        self.report(state_gone=generation)
