"""Messages between worker, agent and lighthouse.

All are level-triggered: a *report* is the whole state of its sender, a *directive* the whole target of its receiver.
Losing, repeating or reordering one does no harm, since the next one says everything again. The lighthouse drops a report
whose ``sequence`` is old; a worker ignores a directive whose generation is.
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
    """A worker's exchange ended by an error."""

    generation: int
    detail: str
    unreachable: tuple[str, ...] = ()
    """Members to which it could not even connect when it tried."""
    missed: tuple[str, ...] = ()
    """Members because of which it broke, as far as this one can tell: perhaps itself."""


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Where the main thread's time of a step goes on one worker: seconds by the clock, smoothed over some steps."""

    microbatch_s: float = 0.0
    """One microbatch: to load and to compute it. All else is of a whole step."""
    loading_s: float = 0.0
    computing_s: float = 0.0
    exchanging_s: float = 0.0
    """The exchange, without ``waiting_s``."""
    waiting_s: float = 0.0
    """In the exchange: for what the others had not computed yet."""
    updating_s: float = 0.0
    """The script's code between the steps."""


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Everything the others need to know of a worker. Worker to agent, and on to the lighthouse."""

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
    """Where that goes; None before the first step."""
    broken: Broken | None = None
    failed: WorkerFailed | None = None
    diverged: StateDiverged | None = None
    unequal: ParametersUnequal | None = None
    retried: StepRetried | None = None
    """The last settlement that lost work, for the journal."""
    notes: tuple[AnyNote, ...] = ()
    """The latest of what it has to tell for the journal."""
    microbatches: int | None = None
    """Into how many the global batch is cut, once the loop has begun."""
    carried_bytes: int = 0
    """How much memory a joiner should set aside for the state, beside that of the model; 0: not known yet."""
    left: bool = False
    """Whether it left the job at a step boundary, as it was told."""
    state_gone: int = 0
    """The generation whose members found that nobody has the training state."""
    phase: str = ""
    """What it was doing when its agent last looked."""
    overdue: WorkerOverdue | None = None
    """What its agent finds about it, if it does one thing for too long."""
    loop: int = 0
    """How many training loops its script has begun."""
    after_loop: bool = False
    """Whether the last of them is over, and the script goes on after it."""
    script_ended: bool = False
    """Whether its script came to its end; it waits for the lighthouse to say that all have."""
    complete: bool = False
    """Whether every step of the job is committed here, and the scripts of all workers came to their end."""
    digest: str | None = None
    """Hash over the whole training state, once complete."""
    checkpoints: bool = False
    """Whether this worker takes checkpoints."""
    unwritten: str = ""
    """Why it cannot write down its steps, if it cannot."""
    behind: bool = False
    """Whether it has only caught up with others so far: its steps are theirs."""


class Exited(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker process ended."""

    worker_id: str
    exit_code: int | None
    signal: int | None
    time: float
    why: str = ""
    """What its agent knows beside that, as the end of a sentence."""


def ending(code: int) -> str:
    """How a process ended, in words; a negative code is that of the signal that killed it."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


class PreemptionOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The whole job is to make room: every worker takes part in one more checkpoint, then leaves."""

    reason: str
    deadline: float | None = None
    """Seconds since 1970; whoever is still there then is ended, complete checkpoint or not."""


class Restoration(msgspec.Struct, frozen=True, kw_only=True):
    """The job began again, since nobody was left who had the training state."""

    number: int
    """Grows with every one. Whoever took part in a generation before it must end."""
    branch: int
    """Of the history that begins with it."""
    checkpoint: str | None = None
    """Name of the newest one of the job's own course; an older one is used if it is damaged. None: all begins anew."""
    step: int = 0
    """Committed steps that are in it."""
    after: int = 0
    """The last generation before it."""
    tries: int = 1
    """How many began from this checkpoint; those that came further than any before are not counted."""
    furthest: int = 0
    """The most steps that the job is known to have committed until then."""
    limit_s: float = 60.0
    """How long its workers are waited for."""


class HostReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Everything an agent knows. Agent to lighthouse; also its heartbeat."""

    host: str
    pid: int
    sequence: int
    workers: tuple[WorkerReport, ...] = ()
    exited: tuple[Exited, ...] = ()
    exhausted: str | None = None
    """Why this agent starts no more workers in the place of lost ones, if it does not."""
    starting: int = 0
    """Workers that it has started, or starts now, and that have not joined yet."""
    draining: str | None = None
    """Why all workers of this host are to leave, if they are."""
    drain_deadline_s: float | None = None
    preempting: PreemptionOrder | None = None
    """Why, and until when, the whole job is to make room, if somebody told this host so."""


class CheckpointWish(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody wants a checkpoint at the next step boundary."""

    number: int
    """Grows with every wish, also over restarts of the lighthouse; a directive repeats the latest."""
    tag: str | None = None
    """A checkpoint with a tag is kept for good."""


class Directive(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The whole target. Lighthouse to agents, and on to their workers."""

    sequence: int
    slots: int = 0
    """Places in the job's layout; 0: not known."""
    generation: Generation | None = None
    """What to act under; whoever is in an older one aborts it at once."""
    upcoming: Generation | None = None
    """What to prepare for, and to enter at a step boundary when all are ready."""
    fenced: tuple[str, ...] = ()
    """Workers that must end."""
    released: tuple[str, ...] = ()
    """Workers without a slot that may go."""
    holders: tuple[str, ...] = ()
    """Members that are known to have the training state."""
    probe: int = 0
    """The generation whose members are to find out which others they can reach; 0: none."""
    winding_down: str | None = None
    """Why every worker is to leave its loop at the next step boundary, if it is."""
    preempting: PreemptionOrder | None = None
    """Every worker is to take a checkpoint at the next step boundary, wait for it to be complete, and leave."""
    saved: tuple[int, int] | None = None
    """Branch and committed steps of the newest complete checkpoint; said only while the job makes room."""
    wishes: tuple[CheckpointWish, ...] = ()
    """The latest wishes for checkpoints, in the order of their numbers; workers know which of them were answered."""
    restoration: Restoration | None = None
    """From where the job began again, the last time that it did."""
    replacing: bool = True
    """Whether agents that ask first (``--on-loss auto``) are to start workers in the place of lost ones."""
    injections: tuple[FaultInjected, ...] = ()
    """Faults that somebody wants to see, the latest few; each is carried out once, by whom it concerns."""
    loop: int = 1
    """The training loop that the job is in or has ended last, from 1: a newcomer's script passes over earlier ones."""
    finishing: int = 0
    """The generation whose members' scripts have all come to their end: each of them may end its process; 0: none."""
    stopping: bool = False
    """The job is over."""
    exit_code: int = 0
    reason: str = ""
    traceback: str | None = None


class FailureReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/failures``: exactly one of ``worker_id`` and ``host``."""

    worker_id: str | None = None
    host: str | None = None
    reason: str = "reported"
