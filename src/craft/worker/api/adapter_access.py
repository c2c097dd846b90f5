"""What adapters, and what runs a script, may know of a job and do with it beyond the script's own surface."""

from __future__ import annotations

from typing import Any

from craft.decide.techniques import Divergence
from craft.worker.api.attempts import numbers
from craft.worker.api.job import Job
from craft.worker.api.steps import Steps
from craft.worker.api.validation import check_whole


def place_of(job: Job) -> tuple[int | None, int | None]:
    """(step, microbatch) that the script is in; (None, None) before the first step.

    After a loop it is the step that would have come next.
    """
    training = job._training
    if training is not None and training.over:
        return training.applied, None
    current = training.current if training is not None else None
    return (None, None) if current is None else current._place


def slots_of(job: Job) -> int:
    """How many workers the job has when all are there; does not change with who is lost."""
    return job._membership.slots


def has_trained(job: Job) -> bool:
    """Whether a loop of the job has begun, or is over."""
    return job._training is not None


def batch_steps(
    job: Job, loader: Any, *, batch: int, microbatches: int, samples_per_epoch: int, steps: int, seed: int
) -> Steps:
    """A loop for adapters over batches of one size: an epoch's last step has fewer of them, and not smaller ones."""
    job._not_training("steps")
    more: dict[str, Any] = dict.fromkeys(("epochs", "shuffle", "collate_fn", "num_workers"))
    more |= {"global_batch": batch * microbatches, "batch": batch, "samples_per_epoch": samples_per_epoch}
    training = job._begin(loader, own_loop=False, microbatches=microbatches, steps=steps, seed=seed, **more)
    return Steps(training, passed=job._passed())


def whole_steps(job: Job, seed: int) -> Steps:
    """A loop for adapters whose steps cannot be cut: every worker computes all of each one, after its commit.

    The inner loop gives numbers, and nothing is to be computed in it. It ends where the adapter ends it.
    """
    job._not_training("steps")
    check_whole(job._techniques)
    more: dict[str, Any] = dict.fromkeys(("global_batch", "steps", "epochs", "shuffle", "collate_fn", "num_workers"))
    training = job._begin(numbers, own_loop=False, whole=True, microbatches=None, seed=seed, **more)
    return Steps(training, passed=job._passed())


def is_alone(job: Job) -> bool:
    """Whether this is a job of one outside of ``craft run``: no worker joins it."""
    return job._settings.socket is None


def may_go_back(job: Job) -> bool:
    """Whether the job goes back to a checkpoint where numbers are not finite."""
    divergence = job._techniques.get(Divergence)
    return divergence is not None and divergence.settings.answer == "rollback"


def finish(job: Job) -> None:
    """The script came to its end: wait until it has on all workers."""
    training = job._training
    if training is None:
        job._reporter.report(script_ended=True)
        return
    training.finish_loop()
    if training.over:
        training.finish()


def left_in_step(job: Job) -> int | None:
    """The step in the middle of which the script left its training loop, though it was not told to; None: it did not."""
    training = job._training
    if training is None or training.over or job._membership.left:
        return None
    return training.applied
