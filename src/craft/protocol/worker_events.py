"""Events that workers report: each is one journal line, repeated in reports until it is written."""

from __future__ import annotations

from craft.protocol.values.event import Event


class CheckpointWritten(Event, frozen=True, kw_only=True, tag=True):
    """A checkpoint is complete and listed under ``url``."""

    name: str
    branch: int
    step: int
    """Committed steps that are in it."""
    url: str
    tag: str | None = None
    total_bytes: int = 0
    new_bytes: int = 0
    """How much of it had to be written; the rest was there already."""
    seconds: float = 0.0
    """Time from the snapshot until it was listed."""


class CheckpointSkipped(Event, frozen=True, kw_only=True, tag=True):
    """A checkpoint was due and was not taken."""

    step: int
    reason: str


class CheckpointFailed(Event, frozen=True, kw_only=True, tag=True):
    """A worker could not write its share of a checkpoint."""

    worker_id: str
    name: str
    step: int
    error: str
    tries: int
    retry_s: float | None
    """It retries after this long; None: it has given up, and the checkpoint will not exist."""


class CheckpointAbandoned(Event, frozen=True, kw_only=True, tag=True):
    """A checkpoint will never be complete: a worker's share of it was not written."""

    name: str
    step: int
    reason: str


class CheckpointRejected(Event, frozen=True, kw_only=True, tag=True):
    """A listed checkpoint cannot be used; an older one is tried."""

    name: str
    step: int
    url: str
    reason: str


class CheckpointRestored(Event, frozen=True, kw_only=True, tag=True):
    """Every worker has loaded a checkpoint, verified it, and goes on from there."""

    name: str
    branch: int
    step: int
    url: str


class StartStepTaken(Event, frozen=True, kw_only=True, tag=True):
    """The job begins at the ``start_step`` of its script, which has loaded the state itself."""

    step: int
    branch: int = 0


class IntervalChosen(Event, frozen=True, kw_only=True, tag=True):
    """CRAFT chose how often checkpoints are taken from now on."""

    interval_s: float
    reason: str
    cost_s: float | None = None
    """The measured cost of one checkpoint for training."""


class NumbersDiverged(Event, frozen=True, kw_only=True, tag=True):
    """A loss or a gradient of a step is not finite; every worker saw it at the same step."""

    step: int
    what: str
    answer: str
    """What is done about it, in words."""


class RolledBack(Event, frozen=True, kw_only=True, tag=True):
    """The job went back to a checkpoint on purpose: a new branch of its history begins."""

    branch: int
    """The new branch."""
    step: int
    """Committed steps of the checkpoint."""
    left_at: int
    """Committed steps when it went back."""
    skipped: int
    """How many steps of data are skipped."""
    reason: str


class Recovered(Event, frozen=True, kw_only=True, tag=True):
    """The first step after a loss or a broken exchange is committed; this is the cost."""

    worker_id: str
    """The reporter: the first member that was there before."""
    generation: int
    """The generation in which the step is committed."""
    since: int
    """The generation of the step before it: losses of all generations from this one on count here."""
    lost: tuple[str, ...]
    """Members of those generations that are not in this one."""
    step: int
    lost_s: float | None
    """Time from commit to commit, less an undisturbed step; None if no step was committed before."""
    retried: tuple[int, ...] = ()
    """Steps that had begun and were resumed."""
    redone: tuple[int, ...] = ()
    """Microbatches of these steps that were computed in place of the lost workers."""
    dropped: tuple[int, ...] = ()
    """Microbatches that no worker computed (only under ``shrink``)."""
    redone_samples: int | None = None
    """Samples in ``redone``; None for streams, where only the script knows."""
    dropped_samples: int | None = None
    committed_at: float = 0.0
    """When the step was committed, in seconds since 1970 on the clock of the worker's host."""


class StragglerFound(Event, frozen=True, kw_only=True, tag=True):
    """A member repeatedly takes longer for a microbatch than the others; all members find this at the same step."""

    worker_id: str
    generation: int
    step: int
    """The step after which it was found."""
    ratio: float
    """How many times as long as the others it takes for a microbatch."""
    own_ms: float
    """Its average time for a microbatch over the observed steps."""
    others_ms: float
    """The median of the others."""
    steps: int
    """Observed steps, from the first one that counted against it."""
    answer: str
    """The answer: report, rebalance or drain."""


class StragglerGone(Event, frozen=True, kw_only=True, tag=True):
    """A member that was slow is as fast as the others again."""

    worker_id: str
    generation: int
    step: int


class ConditionSeen(Event, frozen=True, kw_only=True, tag=True):
    """A technique detected a condition in a worker. Policies of the same or another technique may answer it."""

    technique: str
    what: str
    """One or a few words, by which policies tell conditions apart."""
    worker_id: str
    host: str
    value: float | None = None
    detail: str = ""
    """For people."""
    time: float = 0.0
    """When, in seconds since 1970."""


class ScriptWarned(Event, frozen=True, kw_only=True, tag=True):
    """The script's loop probably does not do what its author means. Training goes on; each text is reported once per job."""

    text: str
    """What was found, and what to do about it."""


class WorkerPaused(Event, frozen=True, kw_only=True, tag=True):
    """A worker was in ``job.paused``, or waited for a checkpoint, for long; reported once that is over."""

    worker_id: str
    reason: str
    seconds: float
    time: float = 0.0
    """When it ended, in seconds since 1970."""


class TechniqueFailed(Event, frozen=True, kw_only=True, tag=True):
    """Code of a technique raised an exception: it is disabled, and the job goes on without it."""

    technique: str
    where: str
    """What failed: a hook on a worker, or a policy in the lighthouse."""
    error: str


AnyNote = (
    CheckpointWritten
    | CheckpointSkipped
    | CheckpointFailed
    | CheckpointAbandoned
    | CheckpointRejected
    | CheckpointRestored
    | IntervalChosen
    | NumbersDiverged
    | RolledBack
    | ConditionSeen
    | TechniqueFailed
    | Recovered
    | StragglerFound
    | StragglerGone
    | ScriptWarned
    | StartStepTaken
    | WorkerPaused
)
"""What workers report for the journal and for people; CRAFT's policies answer ``StragglerFound`` and ``ConditionSeen``."""
