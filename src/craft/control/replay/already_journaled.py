"""Events that earlier lighthouses journaled, and that workers and agents repeat in their reports.

``ReportEvents`` drops those without consequences. The others are handled again, since an earlier lighthouse may have
ended before it carried out its decision; ``Loop`` does not journal them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from craft.protocol import events

_OnceInALife = events.WorkerLost | events.WorkerFailed | events.WorkerFinished | events.WorkerLeft | events.WorkerEnded
_Repeated = (
    _OnceInALife
    | events.WorkerJoined
    | events.WorkerOverdue
    | events.ReplacementsEnded
    | events.ExchangeBroken
    | events.GenerationEntered
    | events.StateGone
    | events.StateDiverged
    | events.StepRetried
    | events.ParametersUnequal
    | events.AnyNote
)
_NAMES = frozenset(each.__name__ for each in _Repeated.__args__)


class AlreadyJournaled:
    """``event in journaled``: whether an earlier lighthouse journaled it."""

    def __init__(self) -> None:
        self._identities: set[object] = set()
        self.worker_ids: set[str] = set()
        """All workers in the journal: an id is never used twice."""

    def __call__(self, line: dict[str, Any]) -> None:
        """Take in a line of the journal."""
        self.worker_ids.update(_named(line))
        if line.get("outcome") == "Fault":
            # Workers lost with their host have no other line.
            self._identities.update((events.WorkerLost, worker_id) for worker_id in line["worker_ids"])
        elif line.get("event") in _NAMES:
            # With the event's time, not the journal's.
            event = {**line, "time": line.get("seen", line["time"])}
            self._identities.add(identity(msgspec.convert(event, _Repeated, strict=False)))

    def __contains__(self, event: object) -> bool:
        return isinstance(event, _Repeated) and identity(event) in self._identities


def _named(line: dict[str, Any]) -> Iterator[str]:
    if line.get("event") == "WorkerJoined":
        yield line["member"]["worker_id"]
    elif line.get("event") in ("WorkerLost", "WorkerFailed"):
        yield line["worker_id"]


def identity(value: object) -> object:
    """Return what makes an event different from others, whatever its reporter, clock and wording."""
    if isinstance(value, events.Recovered):
        return events.Recovered, value.generation
    if isinstance(value, events.WorkerJoined):
        return events.WorkerJoined, value.member.worker_id
    if isinstance(value, _OnceInALife):
        return type(value), value.worker_id
    if isinstance(value, events.WorkerOverdue):
        # New also when the others begin or cease to wait for this worker.
        others = bool(value.waiting), bool(value.elsewhere), value.stopped
        return events.WorkerOverdue, value.worker_id, value.phase, value.step, *others
    return value
