"""Events, in the past tense. Each becomes one line of the journal. Public as ``craft.events``."""

from __future__ import annotations

from craft.protocol.events.generations import (
    ArrivalsEnded,
    ExchangeBroken,
    GenerationEntered,
    GenerationStuck,
    HoldExpired,
    ParametersUnequal,
    StateDiverged,
    StateGone,
    StepRetried,
    TimesMeasured,
)
from craft.protocol.events.requests import (
    AbortRequested,
    AlertFired,
    AlertResolved,
    CheckpointRequested,
    DrainExpired,
    DrainRequested,
    FaultInjected,
    PreemptExpired,
    PreemptRequested,
    StopRequested,
)
from craft.protocol.events.workers import (
    Answered,
    AwaitExpired,
    HostLost,
    HostSilent,
    LoopBegun,
    LoopEnded,
    ReplacementsEnded,
    ReplacementsResumed,
    ScriptEnded,
    WorkerCaughtUp,
    WorkerEnded,
    WorkerFailed,
    WorkerFinished,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerOverdue,
)
from craft.protocol.values.event import Event
from craft.protocol.worker_events import (
    AnyNote,
    CheckpointAbandoned,
    CheckpointFailed,
    CheckpointRejected,
    CheckpointRestored,
    CheckpointSkipped,
    CheckpointWritten,
    ConditionSeen,
    IntervalChosen,
    NumbersDiverged,
    Recovered,
    RolledBack,
    ScriptWarned,
    StartStepTaken,
    StragglerFound,
    StragglerGone,
    TechniqueFailed,
    WorkerPaused,
)

__all__ = [
    "AbortRequested",
    "AlertFired",
    "AlertResolved",
    "Answered",
    "AnyEvent",
    "AnyNote",
    "ArrivalsEnded",
    "AwaitExpired",
    "CheckpointAbandoned",
    "CheckpointFailed",
    "CheckpointRejected",
    "CheckpointRequested",
    "CheckpointRestored",
    "CheckpointSkipped",
    "CheckpointWritten",
    "ConditionSeen",
    "DrainExpired",
    "DrainRequested",
    "Event",
    "ExchangeBroken",
    "FaultInjected",
    "GenerationEntered",
    "GenerationStuck",
    "HoldExpired",
    "HostLost",
    "HostSilent",
    "IntervalChosen",
    "LoopBegun",
    "LoopEnded",
    "NumbersDiverged",
    "ParametersUnequal",
    "PreemptExpired",
    "PreemptRequested",
    "Recovered",
    "ReplacementsEnded",
    "ReplacementsResumed",
    "RolledBack",
    "ScriptEnded",
    "ScriptWarned",
    "StartStepTaken",
    "StateDiverged",
    "StateGone",
    "StepRetried",
    "StopRequested",
    "StragglerFound",
    "StragglerGone",
    "TechniqueFailed",
    "TimesMeasured",
    "WorkerCaughtUp",
    "WorkerEnded",
    "WorkerFailed",
    "WorkerFinished",
    "WorkerJoined",
    "WorkerLeft",
    "WorkerLost",
    "WorkerOverdue",
    "WorkerPaused",
]

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
    | ReplacementsResumed
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
