"""Report to the lighthouse, through the agent, and to the script, through the handlers of ``job.on``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from craft.protocol.errors import BitsDiffer, GroupError
from craft.protocol.events import (
    AnyNote,
    ConditionSeen,
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
from craft.worker.report.activity_page import ActivityPage
from craft.worker.report.channel import Channel

_MAX_NOTES = 16
_MIN_PAUSE_S = 1.0
"""A shorter pause is not worth a line in the journal."""


class EventOutbox:
    """The latest events for the journal, repeated in every report, since a report may get lost. Any thread may add one."""

    def __init__(self, report: Callable[..., None]) -> None:
        self._report = report
        # Guards the two below, and the order of reports.
        self._lock = threading.Lock()
        self._notes: tuple[AnyNote, ...] = ()
        self._conditions: tuple[AnyNote, ...] = ()
        """Events of other packages' techniques: however many there are, they displace no others."""

    def add(self, event: AnyNote) -> None:
        with self._lock:
            if isinstance(event, ConditionSeen):
                self._conditions = (*self._conditions, event)[-_MAX_NOTES:]
            else:
                self._notes = (*self._notes, event)[-_MAX_NOTES:]
            self._report(notes=(*self._notes, *self._conditions))


class Reporter:
    """Any thread may call ``report``, ``note`` and ``broke``; ``emit`` belongs to the main thread."""

    def __init__(
        self, worker_id: str, membership: MembershipClient, channel: Channel | None, emit: Callable[[Event], None]
    ) -> None:
        self._worker_id = worker_id
        self._membership = membership
        self._channel = channel
        self.emit = emit
        """Calls the script's handlers."""
        self._notes = EventOutbox(self.report)

    @property
    def is_heard(self) -> bool:
        """Whether there is an agent to report to: False outside of ``craft run``."""
        return self._channel is not None

    def report(self, *, urgent: bool = True, **changes: Any) -> None:
        """Change this worker's report to the lighthouse."""
        if self._channel is not None:
            self._channel.report(urgent=urgent, **changes)

    def settled(self, settlement: Settlement, generation: int) -> StepRetried | None:
        """Report a settled generation; return the microbatches that it lost, None if it lost none."""
        dropped = tuple(index for index, owner in enumerate(settlement.owners) if owner == DROPPED)
        changes: dict[str, Any] = {"generation": generation, "broken": None, "progress": self._membership.progress}
        retried = None
        if settlement.given or dropped:
            retried = StepRetried(generation=generation, step=settlement.step, given=settlement.given, dropped=dropped)
            changes["retried"] = retried
        self.report(**changes)
        return retried

    def entered(self, settlement: Settlement, generation: int, lost: tuple[str, ...]) -> None:
        """Report a settled generation to the lighthouse and to the script."""
        retried = self.settled(settlement, generation)
        if retried is not None:
            self.emit(retried)
        for worker_id in lost:
            self.emit(WorkerLost(worker_id=worker_id, reason=f"not in generation {generation}", source="peers"))
        self.emit(GenerationEntered(worker_id=self._worker_id, generation=generation))

    def note(self, event: AnyNote) -> None:
        """Report an event for the journal; any thread may call it."""
        self._notes.add(event)

    def paused(self, reason: str, seconds: float) -> None:
        """Report a pause of ``seconds`` that ends now."""
        self.note(
            WorkerPaused(
                worker_id=self._worker_id, reason=reason, seconds=round(seconds, 3), time=round(time.time(), 6)
            )
        )

    def unwritten(self, trouble: str) -> None:
        """Report why this worker's files cannot be written; empty: they can again."""
        self.report(unwritten=trouble)

    def unequal(self, found: ParametersUnequal) -> None:
        self.report(unequal=found)

    def broke(self, generation: int, error: GroupError) -> None:
        """Report at once that the group broke; the exchange thread calls it, too, while the main thread computes."""
        self._membership.broke(generation, error)

    def diverged(self, error: BitsDiffer, step: int, members: tuple[str, ...]) -> None:
        """Report that states differ, which ends the job; every worker does so before it raises ``error``."""
        self.report(diverged=StateDiverged(step=step, detail=str(error), worker_ids=members))

    def state_lost(self, generation: int) -> None:
        """Report that no state is left to continue from; every member of ``generation`` does."""
        self.report(state_gone=generation)


@contextmanager
def paused(activity: ActivityPage, reporter: Reporter, reason: str) -> Iterator[None]:
    """Suspend the watchdog for the block, and report the pause if it was long."""
    began = monotonic()
    try:
        with activity.paused(reason):
            yield
    finally:
        seconds = monotonic() - began
        if seconds >= _MIN_PAUSE_S:
            reporter.paused(reason, seconds)
