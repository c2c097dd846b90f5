"""What happens to a worker: it joins, is lost, fails, finishes, leaves, hangs."""

from __future__ import annotations

from craft.protocol.membership import Member
from craft.protocol.values.event import Event


class WorkerJoined(Event, frozen=True, kw_only=True, tag=True):
    """A worker called ``craft.join()`` and waits for a generation."""

    member: Member
    pid: int = 0


class WorkerLost(Event, frozen=True, kw_only=True, tag=True):
    """A worker is lost, or treated as lost."""

    worker_id: str
    reason: str
    source: str = "agent"
    """The source: agent, heartbeat, watch, api, alert, drain, peers, health."""
    time: float = 0.0
    """When it was detected, in seconds since 1970."""
    step: int | None = None
    """Its committed steps, by its last report; None without one."""


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
    """Whether it was started after the others: as a spare, as a replacement, or by a host that came later."""
    refused: bool = False
    """Whether it is not a bug: the job cannot be started like this."""
    everywhere: bool = False
    """Whether every member finds the same: no other worker would do better."""
    hardware: bool = False
    """Whether a device failed, or another worker of its replica: the script is not to blame."""
    time: float = 0.0


class WorkerFinished(Event, frozen=True, kw_only=True, tag=True):
    """A worker's script ended by itself, with exit code 0."""

    worker_id: str
    step: int = 0
    digest: str | None = None
    """Digest of its training state after its last step."""
    complete: bool = True
    """Whether it reached the end of its training loops, with all others."""
    total_steps: int | None = None
    """Planned steps of its last loop; None: unknown, or it is not complete."""


class LoopBegun(Event, frozen=True, kw_only=True, tag=True):
    """A worker begins another training loop of its script."""

    worker_id: str
    loop: int
    """Which one, from 1."""


class LoopEnded(Event, frozen=True, kw_only=True, tag=True):
    """A worker's training loop is over; its script goes on."""

    worker_id: str
    step: int = 0
    """Committed steps."""
    loop: int = 1


class ScriptEnded(Event, frozen=True, kw_only=True, tag=True):
    """A worker's script ended; its process waits until the scripts of all other workers have."""

    worker_id: str


class WorkerLeft(Event, frozen=True, kw_only=True, tag=True):
    """A worker left at a step boundary on request: every member was ready to go on without it."""

    worker_id: str
    step: int = 0


class WorkerOverdue(Event, frozen=True, kw_only=True, tag=True):
    """A worker does one thing for longer than ever, or its process is stopped."""

    worker_id: str
    phase: str
    """What it does: loading, computing, exchanging, updating, ... or stopped."""
    step: int
    elapsed_s: float
    limit_s: float
    detail: str
    """The finding in words, with the kernel's view of the process."""
    stack: str = ""
    """The stacks of its threads."""
    waiting: tuple[str, ...] = ()
    """Other members that wait in the exchange meanwhile."""
    elsewhere: tuple[str, ...] = ()
    """Other members that do something else."""
    stopped: tuple[str, ...] = ()
    """Other members whose processes are stopped as well."""


class WorkerEnded(Event, frozen=True, kw_only=True, tag=True):
    """The process of a worker that was lost, or had left, ended."""

    worker_id: str


class ReplacementsEnded(Event, frozen=True, kw_only=True, tag=True):
    """An agent starts no more replacements."""

    host: str
    reason: str


class ReplacementsResumed(Event, frozen=True, kw_only=True, tag=True):
    """An agent that was started again on a host starts replacements there."""

    host: str


class HostLost(Event, frozen=True, kw_only=True, tag=True):
    """An agent is silent for longer than the limit, or ended."""

    host: str
    reason: str
    time: float = 0.0
    step: int | None = None
    """Committed steps of its workers, by their last reports."""


class WorkerCaughtUp(Event, frozen=True, kw_only=True, tag=True):
    """A joiner has the training state, and keeps pace with the others."""

    worker_id: str


class HostSilent(Event, frozen=True, kw_only=True, tag=True):
    """The agent of a host with the last copy of the training state is silent."""

    host: str
    reason: str


class Answered(Event, frozen=True, kw_only=True, tag=True):
    """A worker or a host that the job waits for is heard again."""

    worker_id: str | None = None
    host: str | None = None


class AwaitExpired(Event, frozen=True, kw_only=True, tag=True):
    """A worker or a host that the job waits for did not answer within the limit."""

    worker_id: str | None = None
    host: str | None = None
