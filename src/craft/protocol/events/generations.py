"""What happens to a generation: members enter it, it breaks, its state is lost or diverges."""

from __future__ import annotations

from craft.protocol.values.event import Event


class HoldExpired(Event, frozen=True, kw_only=True, tag=True):
    """No replacement joined for those lost from ``generation`` within the limit."""

    generation: int


class ArrivalsEnded(Event, frozen=True, kw_only=True, tag=True):
    """No agent reports another worker on the way to a job that is restored after ``generation``."""

    generation: int


class StateGone(Event, frozen=True, kw_only=True, tag=True):
    """None of the members of ``generation`` has the training state."""

    generation: int


class TimesMeasured(Event, frozen=True, kw_only=True, tag=True):
    """Measured times of this job; reported at a loss under ``--on-loss auto``."""

    step: int
    """Committed steps."""
    total_steps: int | None = None
    microbatches: int | None = None
    step_s: tuple[tuple[int, float], ...] = ()
    """Undisturbed time of a step, by the number of members."""
    spare_s: float | None = None
    """From a loss to the first commit of a spare in the lost slot; None: not measured yet."""
    restart_s: float | None = None
    """From a loss to the first commit of the worker started for it."""


class ExchangeBroken(Event, frozen=True, kw_only=True, tag=True):
    """A member's exchange failed, and it knows of no newer generation."""

    worker_id: str
    generation: int
    detail: str = ""
    unreachable: tuple[str, ...] = ()
    """Members that it could not connect to."""
    missed: tuple[str, ...] = ()
    """Members because of which it broke, as far as this one knows; perhaps itself."""
    progress: tuple[int, ...] = ()
    """Its branch, committed steps, and calls completed since."""


class GenerationStuck(Event, frozen=True, kw_only=True, tag=True):
    """``generation`` is still broken after the time in which a death would show."""

    generation: int


class GenerationEntered(Event, frozen=True, kw_only=True, tag=True):
    """A member acts under ``generation``."""

    worker_id: str
    generation: int
    progress: tuple[int, ...] = ()
    """Its branch, committed steps, and calls completed since."""
    behind: bool = False
    """Whether it has no training state yet, or is catching up."""


class StepRetried(Event, frozen=True, kw_only=True, tag=True):
    """Members of ``generation`` resumed a step that lost some of its microbatches."""

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
    """Workers hold different bits where they must be equal."""

    step: int
    detail: str
    worker_ids: tuple[str, ...]
