"""Actions, in the imperative. Policies return them; the lighthouse carries them out."""

from __future__ import annotations

import msgspec


class Action(msgspec.Struct, frozen=True, kw_only=True, tag_field="action"):
    """The root of all actions. ``reason`` is a sentence for the journal."""

    reason: str


class Reconfigure(Action, frozen=True, kw_only=True, tag=True):
    """Make a new generation at once; its members abort the group they are in."""

    members: tuple[str, ...]
    again: bool = False
    """Whether it is made only because the one before broke without a loss."""
    replacing: bool | None = None
    """Whether free slots are filled from now on; None: as before."""


class Propose(Action, frozen=True, kw_only=True, tag=True):
    """Prepare a generation that all enter together at a step boundary, when every member is ready for it."""

    members: tuple[str, ...]


class Fence(Action, frozen=True, kw_only=True, tag=True):
    """End a worker, so that it can never act under an old generation."""

    worker_id: str


class Release(Action, frozen=True, kw_only=True, tag=True):
    """Let a worker without a slot end: the others need nothing from it."""

    worker_id: str


class MoveSpare(Action, frozen=True, kw_only=True, tag=True):
    """End a spare of a job whose model is sharded, and start it again at another position."""

    worker_id: str
    position: int


class DeclareLost(Action, frozen=True, kw_only=True, tag=True):
    """Treat a worker that may still run as lost: a ``WorkerLost`` of this source follows."""

    worker_id: str
    source: str


class DeclareHostLost(Action, frozen=True, kw_only=True, tag=True):
    """Treat all workers of a host as lost, though they may still run: ``HostLost`` follows."""

    host: str


class Await(Action, frozen=True, kw_only=True, tag=True):
    """Wait for a worker or a host that does not answer and has the last copy of the training state."""

    worker_id: str | None = None
    host: str | None = None
    what: str = ""
    """What is known about it."""
    limit_s: float | None = None
    """After this, AwaitExpired follows; None: the job waits until it answers."""


class Hold(Action, frozen=True, kw_only=True, tag=True):
    """Make no generation until replacements join; after the limit, HoldExpired follows."""

    generation: int
    """The one that lost them."""
    limit_s: float


class Restore(Action, frozen=True, kw_only=True, tag=True):
    """Restore the job: no worker has the training state. A generation follows once enough workers have joined.

    After the limit, HoldExpired follows.
    """

    branch: int
    """The new branch."""
    checkpoint: str | None
    """Name of the checkpoint; None: step 0."""
    step: int
    """Committed steps that are in it."""
    limit_s: float


class Drain(Action, frozen=True, kw_only=True, tag=True):
    """Let a worker leave at the next step boundary for which all are ready."""

    worker_id: str
    deadline_s: float | None = None


class RequestDrain(Action, frozen=True, kw_only=True, tag=True):
    """Drain a worker, or all of a host, as if a person had asked for it: ``DrainRequested`` follows."""

    worker_id: str | None = None
    host: str | None = None
    deadline_s: float | None = None


class Probe(Action, frozen=True, kw_only=True, tag=True):
    """Make every member of ``generation`` find out which others it can reach."""

    generation: int


class Watch(Action, frozen=True, kw_only=True, tag=True):
    """Look at ``generation`` again after a while: if it is still broken then, GenerationStuck follows."""

    generation: int
    times: int = 1
    """How many generations broke in a row: the while grows with it."""


class WindDown(Action, frozen=True, kw_only=True, tag=True):
    """Let every worker leave its loop at the same step boundary, with nothing lost."""


class Preempt(Action, frozen=True, kw_only=True, tag=True):
    """Let every worker take a checkpoint at the next step boundary and leave; at the deadline PreemptExpired follows."""

    deadline: float | None = None
    """Seconds since 1970."""


class TakeCheckpoint(Action, frozen=True, kw_only=True, tag=True):
    """Make all workers take a checkpoint at the next step boundary."""

    tag: str | None = None


class Stop(Action, frozen=True, kw_only=True, tag=True):
    """End the job with this exit code."""

    exit_code: int
    traceback: str | None = None


AnyAction = (
    Reconfigure
    | Propose
    | Fence
    | Release
    | MoveSpare
    | DeclareLost
    | DeclareHostLost
    | Await
    | Hold
    | Restore
    | Drain
    | RequestDrain
    | Probe
    | Watch
    | WindDown
    | Preempt
    | TakeCheckpoint
    | Stop
)
