"""Events that workers tell of: each is one line of the journal, repeated in reports until it is there."""

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
    """From the snapshot until it was listed."""


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
    """It tries again after this long; None: it has given up, and there will be no such checkpoint."""


class CheckpointAbandoned(Event, frozen=True, kw_only=True, tag=True):
    """A checkpoint will never be complete: somebody's share of it was not written."""

    name: str
    step: int
    reason: str


class CheckpointRejected(Event, frozen=True, kw_only=True, tag=True):
    """A checkpoint that is listed cannot be used; an older one is tried."""

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
    """The job begins at the ``start_step`` that its script gave: the script has loaded the state itself."""

    step: int
    branch: int = 0


class IntervalChosen(Event, frozen=True, kw_only=True, tag=True):
    """How often checkpoints are taken from now on, where CRAFT chooses it."""

    interval_s: float
    reason: str
    cost_s: float | None = None
    """What one costs training, as it was measured."""


class NumbersDiverged(Event, frozen=True, kw_only=True, tag=True):
    """A loss or a gradient of a step is not finite; every worker saw it at the same step."""

    step: int
    what: str
    answer: str
    """What is done about it, in words."""


class RolledBack(Event, frozen=True, kw_only=True, tag=True):
    """The job went back to a checkpoint, on purpose: a new branch of its history begins."""

    branch: int
    """The new one."""
    step: int
    """Committed steps of the checkpoint."""
    left_at: int
    """Committed steps when it went back."""
    skipped: int
    """Steps' worth of data that is left out."""
    reason: str


class Recovered(Event, frozen=True, kw_only=True, tag=True):
    """The first step since a loss, or since an exchange that broke, is committed: what that cost."""

    worker_id: str
    """Who says so: the first member that was there before."""
    generation: int
    """Under which the step is committed."""
    since: int
    """Under which the step before it was: the losses of all generations from this one on are counted here."""
    lost: tuple[str, ...]
    """Members of those generations that are not in this one."""
    step: int
    lost_s: float | None
    """Time from commit to commit, less an undisturbed step; None if no step was committed before."""
    retried: tuple[int, ...] = ()
    """Steps that had begun and were taken up again."""
    redone: tuple[int, ...] = ()
    """Microbatches of them that were computed in the place of the lost workers."""
    dropped: tuple[int, ...] = ()
    """Microbatches that nobody computed (only under ``shrink``)."""
    redone_samples: int | None = None
    """Samples in them; None where only the script knows: in streams."""
    dropped_samples: int | None = None
    committed_at: float = 0.0
    """In seconds since 1970, on the clock of the worker's host."""


class StragglerFound(Event, frozen=True, kw_only=True, tag=True):
    """A member takes longer for a microbatch than the others, step after step; all members found it at the same step."""

    worker_id: str
    generation: int
    step: int
    """The step after which it was found."""
    ratio: float
    """How many times as long as the others it takes."""
    own_ms: float
    """How long a microbatch takes there, on average over the steps looked at."""
    others_ms: float
    """How long on the median of the others."""
    steps: int
    """Steps looked at: from the first one that spoke against it."""
    answer: str
    """report, rebalance or drain: what is done about it."""


class StragglerGone(Event, frozen=True, kw_only=True, tag=True):
    """A member that was slow is as fast as the others again."""

    worker_id: str
    generation: int
    step: int


class ConditionSeen(Event, frozen=True, kw_only=True, tag=True):
    """A technique noticed something in a worker. Policies of the same or another technique may answer it."""

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
    """The script's loop probably does not do what is meant. Training goes on; each text is told once in a job."""

    text: str
    """What was found, and what to do about it."""


class WorkerPaused(Event, frozen=True, kw_only=True, tag=True):
    """A worker was in ``job.paused``, or waited for a checkpoint, for a while that is worth a line; told once it is over."""

    worker_id: str
    reason: str
    seconds: float
    time: float = 0.0
    """When it ended, in seconds since 1970."""


class TechniqueFailed(Event, frozen=True, kw_only=True, tag=True):
    """Code of a technique raised an exception: it is left out from then on, and the job goes on without it."""

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
"""What workers tell for the journal and for people; of CRAFT's own, a policy answers ``StragglerFound`` alone."""
