"""Access to a job for adapters and script runners, beyond the public interface."""

from __future__ import annotations

from typing import Any

from craft.decide.techniques import Divergence
from craft.worker.api.attempts import numbers
from craft.worker.api.job import Job
from craft.worker.api.steps import Steps
from craft.worker.api.validation import check_whole


def place_of(job: Job) -> tuple[int | None, int | None]:
    """Return the script's (step, microbatch); (None, None) before the first step.

    After a loop, the step is the one that would have come next.
    """
    training = job._training
    if training is not None and training.over:
        return training.applied, None
    current = training.current if training is not None else None
    return (None, None) if current is None else current._place


def replica_broke(job: Job) -> bool:
    """Return whether the script's last numbers mean nothing: another worker of its replica was lost meanwhile."""
    return job._loops.link is not None and job._loops.link.spoiled


def slots_of(job: Job) -> int:
    """Return the number of workers in a full job; losses do not change it."""
    return job._membership.slots


def has_trained(job: Job) -> bool:
    """Return whether a loop of the job has begun or ended."""
    return job._training is not None


def batch_steps(
    job: Job, loader: Any, *, batch: int, microbatches: int, samples_per_epoch: int, steps: int, seed: int
) -> Steps:
    """Return a loop for adapters over batches of one size.

    An epoch's last step has fewer batches, not smaller ones.
    """
    job._not_training("steps")
    more: dict[str, Any] = dict.fromkeys(("epochs", "shuffle", "collate_fn", "num_workers"))
    more |= {"global_batch": batch * microbatches, "batch": batch, "samples_per_epoch": samples_per_epoch}
    training = job._begin(loader, own_loop=False, microbatches=microbatches, steps=steps, seed=seed, **more)
    return Steps(training)


def whole_steps(job: Job, seed: int) -> Steps:
    """Return a loop for adapters whose steps cannot be divided: every worker computes each step in full, after its commit.

    The inner loop yields numbers, and its body must not compute anything. The adapter ends the loop.
    """
    job._not_training("steps")
    check_whole(job._loops.techniques)
    more: dict[str, Any] = dict.fromkeys(("global_batch", "steps", "epochs", "shuffle", "collate_fn", "num_workers"))
    training = job._begin(numbers, own_loop=False, whole=True, microbatches=None, seed=seed, **more)
    return Steps(training)


def is_alone(job: Job) -> bool:
    """Return whether this job runs outside ``craft run``, with one worker that no other can join."""
    return job._settings.socket is None


def may_go_back(job: Job) -> bool:
    """Return whether the job rolls back to a checkpoint when values are not finite."""
    divergence = job._loops.techniques.get(Divergence)
    return divergence is not None and divergence.settings.answer == "rollback"


def finish(job: Job) -> None:
    """End the script: wait until it has ended on all workers."""
    training = job._training
    if training is None:
        job._loops.reporter.report(script_ended=True)
        return
    training.finish_loop()
    if training.over:
        training.finish()


def left_in_step(job: Job) -> int | None:
    """Return the step in which the script left its training loop unasked; None if it did not."""
    training = job._training
    if training is None or training.over or job._membership.left:
        return None
    return training.applied
