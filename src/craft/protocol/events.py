"""What happened, in the past tense. Each becomes one line of the journal."""

from __future__ import annotations

import msgspec

from craft.protocol.membership import Member
from craft.protocol.values.alerts import AlertAnswer
from craft.protocol.values.event import Event as Event
from craft.protocol.worker_events import (
    AnyNote as AnyNote,
)
from craft.protocol.worker_events import (
    CheckpointAbandoned as CheckpointAbandoned,
)
from craft.protocol.worker_events import (
    CheckpointFailed as CheckpointFailed,
)
from craft.protocol.worker_events import (
    CheckpointRejected as CheckpointRejected,
)
from craft.protocol.worker_events import (
    CheckpointRestored as CheckpointRestored,
)
from craft.protocol.worker_events import (
    CheckpointSkipped as CheckpointSkipped,
)
from craft.protocol.worker_events import (
    CheckpointWritten as CheckpointWritten,
)
from craft.protocol.worker_events import (
    ConditionSeen as ConditionSeen,
)
from craft.protocol.worker_events import (
    IntervalChosen as IntervalChosen,
)
from craft.protocol.worker_events import (
    NumbersDiverged as NumbersDiverged,
)
from craft.protocol.worker_events import (
    Recovered as Recovered,
)
from craft.protocol.worker_events import (
    RolledBack as RolledBack,
)
from craft.protocol.worker_events import (
    ScriptWarned as ScriptWarned,
)
from craft.protocol.worker_events import (
    StartStepTaken as StartStepTaken,
)
from craft.protocol.worker_events import (
    StragglerFound as StragglerFound,
)
from craft.protocol.worker_events import (
    StragglerGone as StragglerGone,
)
from craft.protocol.worker_events import (
    TechniqueFailed as TechniqueFailed,
)
from craft.protocol.worker_events import (
    WorkerPaused as WorkerPaused,
)


class WorkerJoined(Event, frozen=True, kw_only=True, tag=True):
    """A worker called ``craft.join()`` and waits for a generation."""

    member: Member
    pid: int = 0


class WorkerLost(Event, frozen=True, kw_only=True, tag=True):
    """A worker is gone, or is to be treated so."""

    worker_id: str
    reason: str
    source: str = "agent"
    """Who says so: agent, heartbeat, watch, api, alert, drain, peers, health."""
    time: float = 0.0
    """When it was seen, in seconds since 1970."""
    step: int | None = None
    """Steps that it had committed, by its last report; None: it made none."""


class WorkerFailed(Event, frozen=True, kw_only=True, tag=True):
    """The user's code raised an exception that reached the end of the script."""

    worker_id: str
    error: str
    """The exception's last line."""
    traceback: str
    step: int | None = None
    """The step it was in; None before the first one."""
    microbatch: int | None = None
    """The microbatch it computed; None outside of the inner loop."""
    late: bool = False
    """Whether it was started after the others: as a spare, in the place of a lost one, or by a host that came later."""
    refused: bool = False
    """Whether it is no bug: the job cannot be started like this."""
    everywhere: bool = False
    """Whether every member finds the same: no other worker would do better."""
    hardware: bool = False
    """Whether a device failed it: the script is not to blame, however often that happens."""
    time: float = 0.0


class WorkerFinished(Event, frozen=True, kw_only=True, tag=True):
    """A worker's script ended by itself, with exit code 0."""

    worker_id: str
    step: int = 0
    digest: str | None = None
    """Hash over its whole training state at the end of its last step."""
    complete: bool = True
    """Whether it had come to the end of its training loops, with all others."""
    total_steps: int | None = None
    """How many steps its last loop was to have; None: not known, or it is not complete."""


class LoopBegun(Event, frozen=True, kw_only=True, tag=True):
    """A worker begins a further training loop of its script."""

    worker_id: str
    loop: int
    """Which one, from 1."""


class LoopEnded(Event, frozen=True, kw_only=True, tag=True):
    """A worker's training loop is over; its script goes on."""

    worker_id: str
    step: int = 0
    """Steps that are committed."""
    loop: int = 1


class ScriptEnded(Event, frozen=True, kw_only=True, tag=True):
    """A worker's script came to its end; its process waits until the scripts of all other workers have."""

    worker_id: str


class WorkerLeft(Event, frozen=True, kw_only=True, tag=True):
    """A worker left at a step boundary, as it was told: every member had said that it is ready to go on without it."""

    worker_id: str
    step: int = 0


class WorkerOverdue(Event, frozen=True, kw_only=True, tag=True):
    """A worker does one thing for longer than it ever did, or its process is stopped."""

    worker_id: str
    phase: str
    """What it does: loading, computing, exchanging, updating, ... or stopped."""
    step: int
    elapsed_s: float
    limit_s: float
    detail: str
    """All of it in words, with the kernel's view of the process."""
    stack: str = ""
    """The stacks of its threads."""
    waiting: tuple[str, ...] = ()
    """Other members that wait in the exchange meanwhile."""
    elsewhere: tuple[str, ...] = ()
    """Other members that do something else."""
    stopped: tuple[str, ...] = ()
    """Other members whose processes are stopped as well."""


class WorkerEnded(Event, frozen=True, kw_only=True, tag=True):
    """The process of a worker that was lost before, or had left, is no more."""

    worker_id: str


class ReplacementsEnded(Event, frozen=True, kw_only=True, tag=True):
    """An agent starts no more workers in the place of lost ones."""

    host: str
    reason: str


class DrainRequested(Event, frozen=True, kw_only=True, tag=True):
    """Somebody wants workers to leave at a step boundary: exactly one of ``worker_id`` and ``host``."""

    worker_id: str | None = None
    host: str | None = None
    reason: str = "requested"
    deadline_s: float | None = None
    """After this long they are treated as lost."""


class DrainExpired(Event, frozen=True, kw_only=True, tag=True):
    """A worker that was to leave is still there at its deadline."""

    worker_id: str


class HoldExpired(Event, frozen=True, kw_only=True, tag=True):
    """Nobody has taken the place of those lost from ``generation`` within the limit."""

    generation: int


class ArrivalsEnded(Event, frozen=True, kw_only=True, tag=True):
    """Nobody else is on the way to a job that begins again after ``generation``: no agent has said so for a while."""

    generation: int


class StateGone(Event, frozen=True, kw_only=True, tag=True):
    """The members of ``generation`` found that none of them has the training state."""

    generation: int


class HostLost(Event, frozen=True, kw_only=True, tag=True):
    """An agent is silent for longer than the limit, or ended."""

    host: str
    reason: str
    time: float = 0.0
    step: int | None = None
    """Steps that its workers had committed, by their last reports."""


class TimesMeasured(Event, frozen=True, kw_only=True, tag=True):
    """How long things take in this job, as far as it was seen; told at a loss, where what is done about it is chosen by cost."""

    step: int
    """Committed steps."""
    total_steps: int | None = None
    microbatches: int | None = None
    step_s: tuple[tuple[int, float], ...] = ()
    """Undisturbed time of a step, by the number of members."""
    spare_s: float | None = None
    """From a loss to the first commit of a spare in the lost slot; None: not measured yet."""
    restart_s: float | None = None
    """From a loss to the first commit of a worker that was started because of it."""


class ExchangeBroken(Event, frozen=True, kw_only=True, tag=True):
    """A member's exchange ended by an error, and it knows of no newer generation."""

    worker_id: str
    generation: int
    detail: str = ""
    unreachable: tuple[str, ...] = ()
    """Members to which it could not even connect when it tried."""
    missed: tuple[str, ...] = ()
    """Members because of which it broke, as far as this one can tell: perhaps itself."""
    progress: tuple[int, ...] = ()
    """Its branch, committed steps, and calls completed since."""


class GenerationStuck(Event, frozen=True, kw_only=True, tag=True):
    """``generation`` is still broken after the time in which a death would have shown."""

    generation: int


class GenerationEntered(Event, frozen=True, kw_only=True, tag=True):
    """A member acts under ``generation``."""

    worker_id: str
    generation: int
    progress: tuple[int, ...] = ()
    """Its branch, committed steps, and calls completed since."""
    behind: bool = False
    """Whether it has no training state yet, or catches up."""


class WorkerCaughtUp(Event, frozen=True, kw_only=True, tag=True):
    """A worker that joined has the training state, and keeps pace with the others."""

    worker_id: str


class HostSilent(Event, frozen=True, kw_only=True, tag=True):
    """The agent of a host whose workers have the only copy of the training state is not heard."""

    host: str
    reason: str


class Answered(Event, frozen=True, kw_only=True, tag=True):
    """A worker, or a host, that the job waits for is heard again."""

    worker_id: str | None = None
    host: str | None = None


class AwaitExpired(Event, frozen=True, kw_only=True, tag=True):
    """A worker, or a host, that the job waits for has not answered within the limit."""

    worker_id: str | None = None
    host: str | None = None


class StepRetried(Event, frozen=True, kw_only=True, tag=True):
    """Members of ``generation`` settled on going on with a step that lost some of its microbatches."""

    generation: int
    step: int
    given: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()


class ParametersUnequal(Event, frozen=True, kw_only=True, tag=True):
    """Workers began with different parameters; all took those of ``source``."""

    worker_ids: tuple[str, ...]
    source: str
    first: str
    """Name of the first state entry that differed."""


class StateDiverged(Event, frozen=True, kw_only=True, tag=True):
    """Workers hold different bits where they must hold the same."""

    step: int
    detail: str
    worker_ids: tuple[str, ...]


class FaultInjected(Event, frozen=True, kw_only=True, tag=True):
    """Somebody wants something to go wrong, to see what follows. In a directive: carried out once, by whom it concerns."""

    injection_id: str
    """Unique: a directive repeats it."""
    fault: str
    """One of ``protocol.injections.KINDS``."""
    worker_id: str | None = None
    """The worker that it hits, if it is one."""
    host: str | None = None
    """The host whose agent it hits, if it does."""
    agent_pid: int = 0
    """The process of that agent: one that is started in its place is not meant."""
    seconds: float = 0.0
    """How long it lasts, if it ends by itself."""
    delay_ms: float = 0.0
    """How much longer a microbatch takes meanwhile."""


class StopRequested(Event, frozen=True, kw_only=True, tag=True):
    """Somebody wants the job to end at the next step boundary: a person, or the script itself."""

    reason: str


class AbortRequested(Event, frozen=True, kw_only=True, tag=True):
    """Somebody wants every worker out of what it is blocked in: all abort their group and meet again."""

    reason: str = "requested"


class PreemptRequested(Event, frozen=True, kw_only=True, tag=True):
    """The whole job is to make room: it takes a checkpoint at the next step boundary, if there is time, and ends."""

    reason: str
    deadline: float | None = None
    """Seconds since 1970."""


class PreemptExpired(Event, frozen=True, kw_only=True, tag=True):
    """Some workers of a job that was to make room are still there at the deadline."""


class CheckpointRequested(Event, frozen=True, kw_only=True, tag=True):
    """Somebody wants a checkpoint at the next step boundary."""

    reason: str
    tag: str | None = None


class AlertFired(Event, frozen=True, kw_only=True, tag=True):
    """Another system says that something is wrong: Alertmanager, a hook, a CloudEvent."""

    source: str
    name: str
    fingerprint: str
    starts_at: str = ""
    """With the two before it: the same alert, delivered once more, is no news."""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    answer: AlertAnswer = "report"
    """What its rule says is to be done."""
    worker_id: str | None = None
    host: str | None = None
    """Whom of this job it is about: one of the two, or nobody."""
    deadline_s: float | None = None
    reason: str = ""
    """The alert in words, for the journal's lines that follow from it."""
    note: str = ""
    """Why less is done than its rule says, if so."""
    time: float = 0.0
    """When it came, in seconds since 1970."""


class AlertResolved(Event, frozen=True, kw_only=True, tag=True):
    """What another system had said is wrong is so no more. It ends nothing; the same alert counts anew afterwards."""

    source: str
    name: str
    fingerprint: str
    starts_at: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)


AnyEvent = (
    WorkerJoined
    | WorkerLost
    | WorkerFailed
    | WorkerFinished
    | LoopBegun
    | LoopEnded
    | ScriptEnded
    | WorkerLeft
    | WorkerOverdue
    | WorkerEnded
    | ReplacementsEnded
    | DrainRequested
    | DrainExpired
    | HoldExpired
    | ArrivalsEnded
    | StateGone
    | HostLost
    | TimesMeasured
    | ExchangeBroken
    | GenerationStuck
    | GenerationEntered
    | WorkerCaughtUp
    | HostSilent
    | Answered
    | AwaitExpired
    | StepRetried
    | ParametersUnequal
    | StateDiverged
    | FaultInjected
    | StopRequested
    | AbortRequested
    | PreemptRequested
    | PreemptExpired
    | CheckpointRequested
    | AlertFired
    | AlertResolved
    | AnyNote
)
