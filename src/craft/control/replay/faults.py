"""Which events were faults, and what they cost: what the status, the metrics and the summary at the end count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from craft.decide.job.state import JobState
from craft.protocol.events import AnyEvent, HostLost, Recovered, WorkerFailed, WorkerFinished, WorkerLost
from craft.protocol.journal import Cost as Cost
from craft.protocol.journal import Fault as Fault


def _had_joined(state: JobState, event: WorkerFailed) -> bool:
    """Whether it came to a job that is on its way and was in its generation: the others have to go on without it."""
    return event.late and state.generation is not None and event.worker_id in state.generation.worker_ids


def fault_of(
    before: JobState, after: JobState, event: AnyEvent, now: float, known: Iterable[Fault] = ()
) -> Fault | None:
    """Return the fault that ``event`` was; None if nothing was lost by it that was not lost already.

    ``known``: the faults until now, those included that an earlier lighthouse saw and this one hears of again.
    """
    if before.stopping is not None or not isinstance(event, WorkerLost | WorkerFailed | HostLost | WorkerFinished):
        return None
    if isinstance(event, WorkerFailed) and event.refused and not _had_joined(before, event):
        return None
    lost = _lost(after, event) - {view.member.worker_id for view in before.having("lost", "finished")}
    lost -= {worker_id for fault in known for worker_id in fault.worker_ids}
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


def costed(faults: Sequence[Fault], event: Recovered, after: int = 0) -> tuple[tuple[Fault, ...], Cost]:
    """Return the faults, those that ``event`` overcame with what they cost together, and that cost.

    ``after``: the last generation before the job began again, if it did. Whoever began again knows of no step before, and
    what was lost until then is no part of what it tells.
    """
    first = max(event.since, after + 1) if 0 < after < event.generation else event.since
    overcome = [fault for fault in faults if _is_overcome(fault, event, first)]
    cost = Cost(
        worker_ids=tuple(worker_id for fault in overcome for worker_id in fault.worker_ids),
        generation=event.generation,
        step=event.step,
        lost_ms=None if event.lost_s is None else round(1000 * event.lost_s, 3),
        steps_retried=len(event.retried),
        microbatches_redone=len(event.redone),
        samples_redone=event.redone_samples,
        microbatches_dropped=len(event.dropped),
        samples_dropped=event.dropped_samples,
    )
    return tuple(replace(fault, cost=cost) if fault in overcome else fault for fault in faults), cost


def _is_overcome(fault: Fault, event: Recovered, first: int) -> bool:
    if fault.cost is not None or not first <= fault.generation < event.generation:
        return False
    # A spare that was lost meanwhile was missed by nobody.
    return fault.next_generation is not None or bool(set(fault.worker_ids) & set(event.lost))


def faults_in(lines: Iterable[dict[str, Any]]) -> tuple[Fault, ...]:
    """Return the faults that a journal holds: those from before a restart of the lighthouse."""
    faults: tuple[Fault, ...] = ()
    made = after = 0
    for line in lines:
        if line.get("action") in ("Reconfigure", "Propose"):
            made = int(line["generation"])
        elif line.get("action") == "Restore":
            after = made
        if line.get("kind") == "outcome" and line.get("outcome") == "Fault":
            faults += (msgspec.convert(line, Fault, strict=False),)
        elif line.get("event") == "Recovered":
            faults, _ = costed(faults, msgspec.convert(line, Recovered, strict=False), after)
    return faults


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
