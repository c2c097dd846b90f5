"""What happened, in the past tense. Each becomes one line of the journal."""

from __future__ import annotations

import msgspec

from craft.protocol.membership import Member


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """The root of all events."""


class WorkerJoined(Event, frozen=True, kw_only=True, tag=True):
    """A worker called ``craft.join()`` and waits for a generation."""

    member: Member
    pid: int = 0


class WorkerLost(Event, frozen=True, kw_only=True, tag=True):
    """A worker is gone, or is to be treated so."""

    worker_id: str
    reason: str
    source: str = "agent"
    """Who says so: agent, heartbeat, api, peers."""
    time: float = 0.0
    """When it was seen, in seconds since 1970."""


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
    time: float = 0.0


class WorkerFinished(Event, frozen=True, kw_only=True, tag=True):
    """A worker's script ended by itself, with exit code 0."""

    worker_id: str
    step: int = 0
    digest: str | None = None
    """Hash over its whole training state at the end of its last step."""
    complete: bool = True
    """Whether it had committed every step of the job."""


class HostLost(Event, frozen=True, kw_only=True, tag=True):
    """An agent is silent for longer than the limit, or ended."""

    host: str
    reason: str
    time: float = 0.0


class ExchangeBroken(Event, frozen=True, kw_only=True, tag=True):
    """A member's exchange ended by an error, and it knows of no newer generation."""

    worker_id: str
    generation: int
    detail: str = ""


class GenerationStuck(Event, frozen=True, kw_only=True, tag=True):
    """``generation`` is still broken after the time in which a death would have shown."""

    generation: int


class GenerationEntered(Event, frozen=True, kw_only=True, tag=True):
    """A member acts under ``generation``."""

    worker_id: str
    generation: int


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


class StopRequested(Event, frozen=True, kw_only=True, tag=True):
    """Somebody wants the job to end at the next step boundary: a person, or the script itself."""

    reason: str


AnyEvent = (
    WorkerJoined
    | WorkerLost
    | WorkerFailed
    | WorkerFinished
    | HostLost
    | ExchangeBroken
    | GenerationStuck
    | GenerationEntered
    | StepRetried
    | ParametersUnequal
    | StateDiverged
    | StopRequested
)
