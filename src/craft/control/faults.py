"""Which events were faults: what the status, the metrics and the summary at the end count."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from craft.decide.membership import JobState
from craft.protocol.events import AnyEvent, HostLost, WorkerFailed, WorkerFinished, WorkerLost


class Fault(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag=True):
    """One event by which workers were lost while the job was not ending."""

    worker_ids: tuple[str, ...]
    reason: str
    generation: int
    """The generation that it hit; 0 before the first one."""
    next_generation: int | None = None
    """The generation that was made because of it, if one was."""
    seen: float = 0.0
    """When it was seen, in seconds since 1970."""
    host: str | None = None
    """Set if the whole host was lost."""


def fault_of(before: JobState, after: JobState, event: AnyEvent, now: float) -> Fault | None:
    """Return the fault that ``event`` was; None if nothing was lost by it that was not lost already."""
    if before.stopping is not None or not isinstance(event, WorkerLost | WorkerFailed | HostLost | WorkerFinished):
        return None
    if isinstance(event, WorkerFailed) and event.refused:
        return None
    lost = _lost(after, event) - {view.member.worker_id for view in before.having("lost", "finished")}
    if not lost:
        return None
    number = before.generation.number if before.generation is not None else 0
    following = after.generation.number if after.generation is not None else 0
    if isinstance(event, WorkerFinished) and (event.complete or following == number):
        return None
    return Fault(
        worker_ids=tuple(sorted(lost)),
        reason=_reason(event),
        generation=number,
        next_generation=following if following > number else None,
        seen=getattr(event, "time", 0.0) or now,
        host=event.host if isinstance(event, HostLost) else None,
    )


def faults_in(lines: Iterable[dict[str, Any]]) -> tuple[Fault, ...]:
    """Return the faults that a journal holds: those from before a restart of the lighthouse."""
    faults = []
    for line in lines:
        if line.get("kind") == "outcome" and line.get("outcome") == "Fault":
            faults.append(msgspec.convert(line, Fault, strict=False))
    return tuple(faults)


def _lost(after: JobState, event: AnyEvent) -> set[str]:
    if isinstance(event, HostLost):
        return {view.member.worker_id for view in after.having("lost") if view.member.host == event.host}
    assert isinstance(event, WorkerLost | WorkerFailed | WorkerFinished)
    return {event.worker_id}


def _reason(event: AnyEvent) -> str:
    if isinstance(event, WorkerFailed):
        return event.error
    if isinstance(event, WorkerFinished):
        return "left before the end"
    assert isinstance(event, WorkerLost | HostLost)
    return event.reason
