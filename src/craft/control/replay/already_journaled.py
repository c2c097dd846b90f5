"""What earlier lighthouses of a job journaled, and workers and agents repeat in their reports: it is no news.

``Lighthouse`` makes it of the lines of the journal. ``Edges`` leaves out what nothing follows from. All else is handled once
more, since an earlier lighthouse may have ended before it did what it had decided; ``Loop`` only does not write it down again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from craft.protocol.events import (
    AnyNote,
    ExchangeBroken,
    GenerationEntered,
    ParametersUnequal,
    Recovered,
    ReplacementsEnded,
    StateDiverged,
    StateGone,
    StepRetried,
    WorkerEnded,
    WorkerFailed,
    WorkerFinished,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerOverdue,
)

_ONCE_IN_A_LIFE = (WorkerLost, WorkerFailed, WorkerFinished, WorkerLeft, WorkerEnded)
_Repeated = (
    WorkerJoined
    | WorkerLost
    | WorkerFailed
    | WorkerFinished
    | WorkerLeft
    | WorkerEnded
    | WorkerOverdue
    | ReplacementsEnded
    | ExchangeBroken
    | GenerationEntered
    | StateGone
    | StateDiverged
    | StepRetried
    | ParametersUnequal
    | AnyNote
)
_NAMES = frozenset(each.__name__ for each in _Repeated.__args__)


class AlreadyJournaled:
    """``event in told``: whether an earlier lighthouse journaled it."""

    def __init__(self, lines: Iterable[dict[str, Any]] = ()) -> None:
        self._news: set[object] = set()
        self.worker_ids: set[str] = set()
        """All workers that it names: an id is never used twice."""
        for line in lines:
            self.worker_ids.update(_named(line))
            if line.get("outcome") == "Fault":
                # With a host, workers are lost of whom no other line says so.
                self._news.update((WorkerLost, worker_id) for worker_id in line["worker_ids"])
            elif line.get("event") in _NAMES:
                # As it was told: the journal has its own time beside that.
                event = {**line, "time": line.get("seen", line["time"])}
                self._news.add(news(msgspec.convert(event, _Repeated, strict=False)))

    def __contains__(self, event: object) -> bool:
        return isinstance(event, _Repeated) and news(event) in self._news


def _named(line: dict[str, Any]) -> Iterator[str]:
    if line.get("event") == "WorkerJoined":
        yield line["member"]["worker_id"]
    elif line.get("event") in ("WorkerLost", "WorkerFailed"):
        yield line["worker_id"]


def news(value: object) -> object:
    """What makes a value another one than those before, whoever tells of it, with which clock and in which words."""
    if isinstance(value, Recovered):
        return Recovered, value.generation
    if isinstance(value, WorkerJoined):
        return WorkerJoined, value.member.worker_id
    if isinstance(value, _ONCE_IN_A_LIFE):
        return type(value), value.worker_id
    if isinstance(value, WorkerOverdue):
        # Also when the others come to wait for this worker, or cease to.
        others = bool(value.waiting), bool(value.elsewhere), value.stopped
        return WorkerOverdue, value.worker_id, value.phase, value.step, *others
    return value
