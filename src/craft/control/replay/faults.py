"""The faults of the job and their cost, for the status, the metrics and the summary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from craft.decide.job.state import JobState
from craft.protocol.events import AnyEvent, HostLost, Recovered, WorkerFailed, WorkerFinished, WorkerLost
from craft.protocol.journal import Cost as Cost
from craft.protocol.journal import Fault as Fault
from craft.protocol.membership import Slot


class FaultBook:
    """The faults of all lighthouses of this job. Fed by the journal at start, then by the loop."""

    def __init__(self) -> None:
        self.faults: tuple[Fault, ...] = ()
        self._generation = self._restored_after = 0

    def __call__(self, line: dict[str, Any]) -> None:
        """Take in a line of the journal."""
        if line.get("action") in ("Reconfigure", "Propose"):
            self._generation = int(line["generation"])
        elif line.get("action") == "Restore":
            self._restored_after = self._generation
        if line.get("kind") == "outcome" and line.get("outcome") == "Fault":
            self.faults += (msgspec.convert(line, Fault, strict=False),)
        elif line.get("event") == "Recovered":
            self.recovered(msgspec.convert(line, Recovered, strict=False), self._restored_after)

    def observed(self, before: JobState, after: JobState, event: AnyEvent, now: float) -> Fault | None:
        """Record and return the fault behind ``event``, if it was one."""
        fault = fault_of(before, after, event, now, self.faults)
        if fault is not None:
            self.faults += (fault,)
        return fault

    def recovered(self, event: Recovered, restored_after: int) -> Cost:
        """Record and return the cost of the faults that ``event`` overcame."""
        self.faults, cost = costed(self.faults, event, restored_after)
        return cost


def _had_joined(state: JobState, event: WorkerFailed) -> bool:
    """Return whether it joined a running job and is in its generation: the others go on without it."""
    return event.late and state.generation is not None and event.worker_id in state.generation.worker_ids


def fault_of(
    before: JobState, after: JobState, event: AnyEvent, now: float, known: Iterable[Fault] = ()
) -> Fault | None:
    """Return the fault behind ``event``; None if it lost no further worker.

    ``known``: the faults so far, those that an earlier lighthouse recorded included.
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
    worker_ids = tuple(sorted(lost))
    return Fault(
        worker_ids=worker_ids,
        reason=_reason(event),
        generation=number,
        next_generation=following if following > number else None,
        seen=getattr(event, "time", 0.0) or now,
        host=event.host if isinstance(event, HostLost) else None,
        slots=_slots(before, worker_ids),
    )


def _slots(state: JobState, worker_ids: Sequence[str]) -> tuple[Slot | None, ...] | msgspec.UnsetType:
    if state.replica_size == 1:
        return msgspec.UNSET
    found = {} if state.generation is None else {each.worker_id: each.slot for each in state.generation.members}
    return tuple(found[each] or None if each in found else None for each in worker_ids)


def costed(faults: Sequence[Fault], event: Recovered, after: int = 0) -> tuple[tuple[Fault, ...], Cost]:
    """Return the faults, with the cost in those that ``event`` overcame, and that cost.

    ``after``: the last generation before a restore, 0 without one. Restored workers know no earlier step, so their
    report does not cover earlier losses.
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
    # The loss of a spare delayed no step.
    return fault.next_generation is not None or bool(set(fault.worker_ids) & set(event.lost))


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
