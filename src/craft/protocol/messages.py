"""Messages between worker, agent and lighthouse.

All are level-triggered: a *report* has the whole state of its sender, a *directive* the whole target of its receiver.
Losing, repeating or reordering one does no harm, since the next one has everything again. The lighthouse drops a report
with an old ``sequence``; a worker ignores a directive with an old generation.
"""

from __future__ import annotations

import signal

import msgspec

from craft.protocol.events import (
    AnyNote,
    FaultInjected,
    ParametersUnequal,
    StateDiverged,
    StepRetried,
    WorkerFailed,
    WorkerOverdue,
)
from craft.protocol.membership import Generation, Member

PROTOCOL_VERSION = 1


class Broken(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's exchange failed with an error."""

    generation: int
    detail: str
    unreachable: tuple[str, ...] = ()
    """Members that it could not connect to."""
    missed: tuple[str, ...] = ()
    """Members because of which it broke, as far as this one knows; perhaps itself."""


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How one worker's main thread spends a step: wall-clock seconds, smoothed over some steps."""

    microbatch_s: float = 0.0
    """Time to load and compute one microbatch. All other times are per step."""
    loading_s: float = 0.0
    computing_s: float = 0.0
    exchanging_s: float = 0.0
    """The exchange, without ``waiting_s``."""
    waiting_s: float = 0.0
    """Time in the exchange, waiting for what the others had not computed yet."""
    updating_s: float = 0.0
    """Time in the script's code between the steps."""


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The whole state of a worker. Worker to agent, and on to the lighthouse."""

    member: Member
    pid: int
    sequence: int = 0
    joined: bool = False
    """Whether the script has called ``join()``."""
    generation: int = 0
    """The generation it acts under."""
    step: int = 0
    """Committed steps."""
    progress: tuple[int, ...] = ()
    """Branch, committed steps and calls completed since, when it last entered a generation or its exchange last broke."""
    total_steps: int | None = None
    metrics: dict[str, float] = {}
    step_s: float = 0.0
    """Smoothed time from commit to commit."""
    times: StepTimes | None = None
    """How that time is spent; None before the first step."""
    broken: Broken | None = None
    failed: WorkerFailed | None = None
    diverged: StateDiverged | None = None
    unequal: ParametersUnequal | None = None
    retried: StepRetried | None = None
    """The last settlement that lost work, for the journal."""
    notes: tuple[AnyNote, ...] = ()
    """Its latest events for the journal."""
    microbatches: int | None = None
    """How many microbatches the global batch has, once the loop has begun."""
    carried_bytes: int = 0
    """How much memory a joiner should reserve for the state, besides that of the model; 0: unknown yet."""
    left: bool = False
    """Whether it left the job at a step boundary on request."""
    state_gone: int = 0
    """The generation whose members found that none of them has the training state."""
    phase: str = ""
    """What it was doing when its agent last looked."""
    overdue: WorkerOverdue | None = None
    """Its agent's finding, if it does one thing for too long."""
    loop: int = 0
    """How many training loops its script has begun."""
    after_loop: bool = False
    """Whether the last of them is over and the script still runs."""
    script_ended: bool = False
    """Whether its script ended; it waits until the lighthouse reports that all have."""
    complete: bool = False
    """Whether every step of the job is committed here and the scripts of all workers ended."""
    digest: str | None = None
    """Hash of the whole training state, once complete."""
    checkpoints: bool = False
    """Whether this worker takes checkpoints."""
    unwritten: str = ""
    """Why it cannot record its steps, if it cannot."""
    behind: bool = False
    """Whether it is still catching up: its committed steps are those of the others."""


class Exited(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker process ended."""

    worker_id: str
    exit_code: int | None
    signal: int | None
    time: float
    why: str = ""
    """What else its agent knows, as the end of a sentence."""


def ending(code: int) -> str:
    """Return how a process ended, in words; a negative code is that of the signal that killed it."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


class PreemptionOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A preemption of the whole job: every worker takes part in one more checkpoint, then leaves."""

    reason: str
    deadline: float | None = None
    """Seconds since 1970; workers still there then are ended, even without a complete checkpoint."""


class Restoration(msgspec.Struct, frozen=True, kw_only=True):
    """A restart of the job after every copy of the training state was lost."""

    number: int
    """Grows with every restore. A worker that was in a generation before it must end."""
    branch: int
    """The branch of the history that begins with it."""
    checkpoint: str | None = None
    """Name of the job's newest checkpoint; if it is damaged, an older one is used. None: the job starts from step 0."""
    step: int = 0
    """Committed steps that are in it."""
    after: int = 0
    """The last generation before it."""
    tries: int = 1
    """How many restores began from this checkpoint; those that got further than any before do not count."""
    furthest: int = 0
    """The most steps that the job is known to have committed before it."""
    limit_s: float = 60.0
    """How long to wait for its workers."""


class HostPart(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of a host that holds no whole replicas; their positions follow each other."""

    workers: int
    first_position: int | None = None
    """That of its first worker; None: not known yet."""


class HostReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The whole state of a host. Agent to lighthouse; also its heartbeat."""

    host: str
    pid: int
    sequence: int
    workers: tuple[WorkerReport, ...] = ()
    exited: tuple[Exited, ...] = ()
    exhausted: str | None = None
    """Why this agent starts no more replacements, if it does not."""
    starting: int = 0
    """Workers that it started, or starts now, and that have not joined yet."""
    draining: str | None = None
    """Why all workers of this host are to leave, if they are."""
    drain_deadline_s: float | None = None
    preempting: PreemptionOrder | None = None
    """Why, and until when, the whole job is preempted, if this host was told so."""
    part: HostPart | msgspec.UnsetType = msgspec.UNSET
    """Unset where the host holds whole replicas."""


class CheckpointWish(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a checkpoint at the next step boundary."""

    number: int
    """Grows with every request, also across restarts of the lighthouse; a directive repeats the latest."""
    tag: str | None = None
    """A checkpoint with a tag is kept for good."""


class Directive(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The whole target. Lighthouse to agents, and on to their workers."""

    sequence: int
    slots: int = 0
    """Slots of the job; 0: unknown."""
    first_positions: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    """By host, the position of its first worker; unset where every host holds whole replicas."""
    generation: Generation | None = None
    """The generation to act under; members of an older one abort it at once."""
    upcoming: Generation | None = None
    """The generation to prepare, and to enter at a step boundary when all are ready."""
    fenced: tuple[str, ...] = ()
    """Workers that must end."""
    released: tuple[str, ...] = ()
    """Workers without a slot that may end."""
    spare_positions: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    """Spares that end now: their agents start them again at this position. Unset: none."""
    holders: tuple[str, ...] = ()
    """Members that are known to have the training state."""
    probe: int = 0
    """The generation whose members are to probe which others they can reach; 0: none."""
    winding_down: str | None = None
    """Why every worker is to leave its loop at the next step boundary, if it is."""
    preempting: PreemptionOrder | None = None
    """Every worker is to take a checkpoint at the next step boundary, wait for it to be complete, and leave."""
    saved: tuple[int, int] | None = None
    """Branch and committed steps of the newest complete checkpoint; set only during a preemption."""
    wishes: tuple[CheckpointWish, ...] = ()
    """The latest requests for checkpoints, in the order of their numbers; workers know which are answered."""
    restoration: Restoration | None = None
    """The last restore of the job."""
    replacing: bool = True
    """Whether agents that ask first (``--on-loss auto``) are to start replacements."""
    injections: tuple[FaultInjected, ...] = ()
    """The latest few faults to inject; the agent or worker that one names injects it once."""
    loop: int = 1
    """The job's current training loop, or the last one that ended; from 1. A newcomer's script skips earlier ones."""
    finishing: int = 0
    """The generation whose members' scripts have all ended: each may end its process; 0: none."""
    stopping: bool = False
    """Whether the job is over."""
    exit_code: int = 0
    reason: str = ""
    traceback: str | None = None


class FailureReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/failures``: exactly one of ``worker_id`` and ``host``."""

    worker_id: str | None = None
    host: str | None = None
    reason: str = "reported"
