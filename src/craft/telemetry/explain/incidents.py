"""Group the journal of a run into incidents.

An *incident* begins with a loss or a broken exchange, and ends when a step is committed again. Losses meanwhile belong to it.
Only files are read: the job may be over, or its lighthouse down.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from craft.protocol.events import Recovered
from craft.telemetry.explain.amounts import Line

LOSSES = frozenset({"WorkerLost", "WorkerFailed", "HostLost", "WorkerFinished"})
ANSWERS = frozenset({"Reconfigure", "Hold", "Restore", "Stop"})
_OMENS = frozenset({"WorkerOverdue", "FaultInjected", "AlertFired", "DrainExpired", "ExchangeBroken"})
_OMENS_S = 60.0
"""Events about a worker up to this long before its loss may explain it."""


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, or several that were overcome together."""

    faults: tuple[Line, ...]
    """Lines of the journal; none if an exchange broke without a loss."""
    omens: tuple[Line, ...]
    """Earlier events about those who were lost."""
    lines: tuple[Line, ...]
    """From the first event to the commit that ends it."""
    after: tuple[Line, ...]
    """From there to the next incident."""
    recovered: Recovered | None
    """None while it is not overcome, or if it never was."""
    missed: bool
    """Whether the others had to react: the loss of a spare concerns no other worker."""

    @property
    def worker_ids(self) -> tuple[str, ...]:
        return tuple(worker_id for fault in self.faults for worker_id in fault["worker_ids"])

    @property
    def began(self) -> float:
        """When it was first seen, in seconds since 1970."""
        return min(moment(line) for line in self.lines)

    @property
    def generation(self) -> int:
        """The generation that it hit."""
        if self.faults:
            return int(self.faults[0]["generation"])
        return next((int(line["generation"]) for line in self.lines if line.get("event") == "ExchangeBroken"), 0)

    @property
    def stop(self) -> Line | None:
        """Set if the job ended because of it."""
        return next((line for line in self.lines if line.get("action") == "Stop"), None)


def moment(line: Line) -> float:
    """Return when the event of a line was seen; for most lines, when it was written."""
    return float(line.get("seen") or line["time"])


def incidents(journal: Sequence[Line]) -> list[Incident]:
    """Return the incidents of a run in order."""
    spans = _spans(journal)
    found = []
    for number, (begin, end, missed) in enumerate(spans):
        until = spans[number + 1][0] if number + 1 < len(spans) else len(journal)
        before = spans[number - 1][1] if number else 0
        lines = tuple(journal[begin:end])
        faults = tuple(line for line in lines if line.get("outcome") == "Fault")
        found.append(
            Incident(
                faults=faults,
                omens=_omens(journal[before:begin], lines, faults),
                lines=lines,
                after=tuple(journal[end:until]),
                recovered=_recovered(lines),
                missed=missed,
            )
        )
    return found


def _spans(journal: Sequence[Line]) -> list[tuple[int, int, bool]]:
    """Return (first line, line after the last, whether the others had to react) of each incident."""
    spans: list[tuple[int, int, bool]] = []
    begin: int | None = None
    loss = broken = None
    restored = False
    for index, line in enumerate(journal):
        name = line.get("event") or line.get("action") or line.get("outcome")
        if name in LOSSES:
            loss = index
        elif name == "ExchangeBroken" and broken is None:
            broken = index
        elif name == "Reconfigure" and line.get("again") and begin is None:
            begin = index if broken is None else broken
        elif name == "Fault" and begin is None:
            first = index if loss is None else loss
            if any(each.get("action") in ANSWERS for each in journal[first:index]):
                begin = first
            else:
                spans.append((first, index + 1, False))
        elif name == "Restore":
            restored = True
        elif name == "Cost" or (name == "CheckpointRestored" and restored):
            # No worker is left that could report the cost of losing all.
            restored = False
            if begin is not None:
                spans.append((begin, index + 1, True))
            begin = broken = None
    if begin is not None:
        spans.append((begin, len(journal), True))
    return spans


def _recovered(lines: Sequence[Line]) -> Recovered | None:
    reports = (line for line in lines if line.get("event") == "Recovered")
    return next((msgspec.convert(line, Recovered, strict=False) for line in reports), None)


def _omens(before: Sequence[Line], lines: Sequence[Line], faults: Sequence[Line]) -> tuple[Line, ...]:
    lost = {worker_id for fault in faults for worker_id in fault["worker_ids"]}
    hosts = {fault["host"] for fault in faults if fault.get("host")}
    since = lines[0]["time"] - _OMENS_S

    def about(line: Line) -> bool:
        named = {line.get("worker_id"), *(line.get("unreachable") or ())}
        return bool(named & lost) or line.get("host") in hosts or line["event"] == "ExchangeBroken"

    found = [line for line in before if line.get("event") in _OMENS and line["time"] >= since and about(line)]
    return tuple(found[-10:])
