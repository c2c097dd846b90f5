"""Count the job's checkpoints, for the status and the metrics.

``Lighthouse`` passes it every line of the journal: those of earlier lighthouses first, then each as it is written.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from craft.decide.job.state import JobState
from craft.protocol.events import (
    AnyNote,
    CheckpointFailed,
    CheckpointRestored,
    CheckpointWritten,
    IntervalChosen,
    RolledBack,
)

_NOTES = frozenset(each.__name__ for each in AnyNote.__args__)


class LastCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The newest complete one."""

    name: str
    branch: int
    step: int
    url: str
    tag: str | None
    total_bytes: int
    new_bytes: int
    seconds: float
    time: float
    """When the lighthouse heard of it, in seconds since 1970."""


class CheckpointsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All that is told of checkpoints; counts are those of the whole run."""

    taken: bool = False
    """Whether a worker reports that it takes them."""
    last: LastCheckpoint | None = None
    interval_s: float | None = None
    """The interval, where CRAFT chooses it."""
    reason: str = ""
    """Why this interval."""
    written: int = 0
    failures: int = 0
    """Failed writes of a worker's share, those that were tried again included."""
    failure: str | None = None
    """The last failure."""
    skipped: int = 0
    abandoned: int = 0
    rejected: int = 0
    """Checkpoints that could not be used when the job started."""
    restored: str | None = None
    """The one that the job started from."""
    total_bytes: int = 0
    """Sum over all that were written."""
    new_bytes: int = 0


_COUNTED = {
    "CheckpointWritten": "written",
    "CheckpointFailed": "failures",
    "CheckpointSkipped": "skipped",
    "CheckpointAbandoned": "abandoned",
    "CheckpointRejected": "rejected",
}


class CheckpointBook:
    """Counts checkpoints from the lines of the journal."""

    def __init__(self) -> None:
        self.status = CheckpointsStatus()
        self.newest: CheckpointWritten | None = None
        self.begun_from: CheckpointRestored | None = None
        """The checkpoint of the last start or restore."""
        self.branch = 0
        """The newest branch."""

    def added_to(self, state: JobState) -> JobState:
        """Return the state of a new lighthouse with the checkpoints that an earlier one journaled."""
        branch = max(state.branch, self.branch)
        return replace(state, checkpoint=self.newest, begun_from=self.begun_from, branch=branch)

    def __call__(self, line: dict[str, Any]) -> None:
        """Take in a line of the journal."""
        if line.get("event") not in _NOTES:
            return
        note: AnyNote = msgspec.convert(line, AnyNote, strict=False)
        if isinstance(note, CheckpointWritten | CheckpointRestored | RolledBack):
            self.branch = max(self.branch, note.branch)
        counted = _COUNTED.get(type(note).__name__)
        if counted is not None:
            self.status = replace(self.status, **{counted: getattr(self.status, counted) + 1})
        if isinstance(note, CheckpointWritten):
            self._written(note, line["time"])
        elif isinstance(note, CheckpointFailed):
            self.status = replace(self.status, failure=f"{note.worker_id}: {note.error}")
        elif isinstance(note, CheckpointRestored):
            self.begun_from = note
            self.status = replace(self.status, restored=note.name)
        elif isinstance(note, IntervalChosen):
            self.status = replace(self.status, interval_s=note.interval_s, reason=note.reason)

    def _written(self, note: CheckpointWritten, time: float) -> None:
        self.newest = note
        self.status = replace(
            self.status,
            last=LastCheckpoint(**asdict(note), time=time),
            total_bytes=self.status.total_bytes + note.total_bytes,
            new_bytes=self.status.new_bytes + note.new_bytes,
        )
