"""The status of the job: the answer to ``GET /v1/status``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from craft.control.replay.checkpoints import CheckpointsStatus
from craft.control.replay.faults import Fault
from craft.decide.job.state import JobState
from craft.decide.policies.policy import EXIT_PREEMPTED
from craft.protocol.messages import WorkerReport


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    worker_id: str
    pid: int | None
    """None if it was not heard since the lighthouse started."""
    host: str
    rank: int | None
    """None if it holds no slot now."""
    state: str
    """starting, waiting, member, lost, left or finished."""
    step: int
    microbatch_s: float | None = None
    """Time to load and compute a microbatch, if known."""
    replica: int | msgspec.UnsetType | None = msgspec.UNSET
    """The replica that it is in; None if it holds no slot now; unset where every replica is one worker."""
    position: int | msgspec.UnsetType = msgspec.UNSET
    """Its position in a replica; unset where every replica is one worker."""


class AgentStatus(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    pid: int | None
    connected: bool
    silent_s: float


class LighthouseStatus(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    url: str


class Status(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    generation: int
    state: str
    """forming, running, restoring, stopping, finished, preempted or failed."""
    workers: tuple[WorkerStatus, ...]
    lighthouse: LighthouseStatus
    faults: int
    fault_list: tuple[Fault, ...]
    metrics: dict[str, float]
    slots: int
    total_steps: int | None
    step_s: float
    reason: str
    """Why the job stops or stopped; empty while it goes on."""
    exit_code: int | None
    upcoming: int | None
    """The generation that is being prepared, if any."""
    agents: tuple[AgentStatus, ...]
    settled: bool
    """Whether every member is known to act under ``generation``."""
    checkpoints: CheckpointsStatus
    chaos: bool
    """Whether the job was started for fault injection."""
    next_numbers: dict[str, int] = {}
    """By prefix of workers' names, the first unused number."""
    replica_size: int | msgspec.UnsetType = msgspec.UNSET
    """Workers that hold one copy of the model together; unset: 1."""


def status_of(
    state: JobState,
    reports: Mapping[str, WorkerReport],
    faults: Sequence[Fault],
    agents: Sequence[AgentStatus],
    lighthouse: LighthouseStatus,
    checkpoints: CheckpointsStatus,
    chaos: bool = False,
    worker_ids: Iterable[str] = (),
) -> Status:
    """Assemble the status; ``worker_ids``: all that were ever used."""
    # The worker that is furthest represents the job: the others are at most a report behind.
    # After a restore, reports from before it do not count.
    after = state.restoration.after if state.restoration is not None else 0
    first = max(
        reports.values(), key=lambda report: (report.generation > after, report.step, report.generation), default=None
    )
    stop = state.stopping
    return Status(
        step=first.step if first is not None else 0,
        generation=state.generation.number if state.generation is not None else 0,
        state=state_word(state),
        workers=_workers(state, reports),
        lighthouse=lighthouse,
        faults=len(faults),
        fault_list=tuple(faults),
        metrics=first.metrics if first is not None else {},
        slots=state.slots,
        total_steps=first.total_steps if first is not None else None,
        step_s=first.step_s if first is not None else 0.0,
        reason=stop.reason if stop is not None else _why_ending(state),
        exit_code=stop.exit_code if stop is not None else None,
        upcoming=state.upcoming.number if state.upcoming is not None else None,
        agents=tuple(agents),
        settled=_settled(state),
        checkpoints=checkpoints,
        chaos=chaos,
        next_numbers=_next_numbers(worker_ids),
        replica_size=state.replica_size if state.replica_size > 1 else msgspec.UNSET,
    )


def _next_numbers(worker_ids: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for worker_id in worker_ids:
        prefix = worker_id.rstrip("0123456789")
        if prefix != worker_id:
            found[prefix] = max(found.get(prefix, 0), int(worker_id[len(prefix) :]) + 1)
    return dict(sorted(found.items()))


def _why_ending(state: JobState) -> str:
    if state.preempting is not None:
        return f"makes room: {state.preempting.reason}"
    return state.winding_down or ""


def _settled(state: JobState) -> bool:
    current = state.generation
    return current is not None and all(view.entered >= current.number for view in state.having("member"))


def state_word(state: JobState) -> str:
    """Return the state of the job in one word."""
    if state.stopping is not None:
        if state.having("waiting", "member"):
            return "stopping"
        return {0: "finished", EXIT_PREEMPTED: "preempted"}.get(state.stopping.exit_code, "failed")
    if state.ending:
        return "stopping"
    if state.restoring:
        return "restoring"
    return "running" if state.generation is not None else "forming"


def _workers(state: JobState, reports: Mapping[str, WorkerReport]) -> tuple[WorkerStatus, ...]:
    members = {view.member.worker_id: view.member for view in state.workers}
    members.update((worker_id, report.member) for worker_id, report in reports.items())
    standings = {view.member.worker_id: view.standing for view in state.workers}
    seats = {each.worker_id: each.slot for each in state.generation.members} if state.generation else {}
    ranks = {worker_id: rank for rank, worker_id in enumerate(state.generation.worker_ids if state.generation else ())}
    rows = []
    for worker_id, member in members.items():
        report, standing = reports.get(worker_id), standings.get(worker_id, "starting")
        slot = seats.get(worker_id, msgspec.UNSET) if standing == "member" else msgspec.UNSET
        rows.append(
            WorkerStatus(
                worker_id=worker_id,
                pid=report.pid if report is not None else None,
                host=member.host,
                rank=ranks.get(worker_id) if standing == "member" else None,
                state=standing,
                step=report.step if report is not None else 0,
                microbatch_s=report.times.microbatch_s if report is not None and report.times is not None else None,
                replica=msgspec.UNSET if member.slot is msgspec.UNSET else None if not slot else slot.replica,
                position=msgspec.UNSET if member.slot is msgspec.UNSET else member.slot.position,
            )
        )
    return tuple(rows)
