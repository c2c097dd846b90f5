"""What people and other systems ask for or report: drains, stops, checkpoints, faults, alerts."""

from __future__ import annotations

import msgspec

from craft.protocol.values.alerts import AlertAnswer
from craft.protocol.values.event import Event


class DrainRequested(Event, frozen=True, kw_only=True, tag=True):
    """Workers are asked to leave at a step boundary: exactly one of ``worker_id`` and ``host``."""

    worker_id: str | None = None
    host: str | None = None
    reason: str = "requested"
    deadline_s: float | None = None
    """After this long they are treated as lost."""


class DrainExpired(Event, frozen=True, kw_only=True, tag=True):
    """A draining worker is still there at its deadline."""

    worker_id: str


class FaultInjected(Event, frozen=True, kw_only=True, tag=True):
    """A fault is to be injected. A directive carries it to the agent or worker that injects it, once."""

    injection_id: str
    """Unique: directives repeat it."""
    fault: str
    """One of ``protocol.values.injections.KINDS``."""
    worker_id: str | None = None
    """The worker that it hits, if any."""
    host: str | None = None
    """The host whose agent it hits, if any."""
    agent_pid: int = 0
    """The process of that agent: its successor is not meant."""
    seconds: float = 0.0
    """How long it lasts, if it ends by itself."""
    delay_ms: float = 0.0
    """How much longer a microbatch takes meanwhile."""


class StopRequested(Event, frozen=True, kw_only=True, tag=True):
    """A person or the script asks the job to end at the next step boundary."""

    reason: str


class AbortRequested(Event, frozen=True, kw_only=True, tag=True):
    """All workers are asked to abort their in-flight collective and re-form the group."""

    reason: str = "requested"


class PreemptRequested(Event, frozen=True, kw_only=True, tag=True):
    """The job is preempted: it takes a checkpoint at the next step boundary, if there is time, and ends."""

    reason: str
    deadline: float | None = None
    """Seconds since 1970."""


class PreemptExpired(Event, frozen=True, kw_only=True, tag=True):
    """Some workers of a preempted job are still there at the deadline."""


class CheckpointRequested(Event, frozen=True, kw_only=True, tag=True):
    """A checkpoint is requested at the next step boundary."""

    reason: str
    tag: str | None = None


class AlertFired(Event, frozen=True, kw_only=True, tag=True):
    """Another system reports a problem: Alertmanager, a hook, a CloudEvent."""

    source: str
    name: str
    fingerprint: str
    starts_at: str = ""
    """With the two before it, identifies the alert: a repeated delivery is ignored."""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    answer: AlertAnswer = "report"
    """The answer of its rule."""
    worker_id: str | None = None
    host: str | None = None
    """The worker or host of this job that it names, if any."""
    deadline_s: float | None = None
    reason: str = ""
    """The alert in words, for journal lines that follow from it."""
    note: str = ""
    """Why less is done than its rule says, if so."""
    time: float = 0.0
    """When it arrived, in seconds since 1970."""


class AlertResolved(Event, frozen=True, kw_only=True, tag=True):
    """Another system reports that a problem is over. It ends nothing; the same alert counts anew afterwards."""

    source: str
    name: str
    fingerprint: str
    starts_at: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
