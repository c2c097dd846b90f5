"""What a worker tells for the journal: the latest are repeated in every report, since one of those may get lost."""

from __future__ import annotations

import threading
from typing import Protocol

from craft.protocol.events import AnyNote, ConditionSeen

_MAX_NOTES = 16


class ReportUpdate(Protocol):
    """Changes what the lighthouse is told of this worker."""

    def __call__(self, *, notes: tuple[AnyNote, ...]) -> None: ...


class EventOutbox:
    """Any thread may add some."""

    def __init__(self, report: ReportUpdate) -> None:
        self._report = report
        # Guards what follows, and the order of reports.
        self._lock = threading.Lock()
        self._notes: tuple[AnyNote, ...] = ()
        self._conditions: tuple[AnyNote, ...] = ()
        """Those of techniques of other packages: however many there are, they push out none of the others."""

    def add(self, event: AnyNote) -> None:
        with self._lock:
            if isinstance(event, ConditionSeen):
                self._conditions = (*self._conditions, event)[-_MAX_NOTES:]
            else:
                self._notes = (*self._notes, event)[-_MAX_NOTES:]
            self._report(notes=(*self._notes, *self._conditions))
