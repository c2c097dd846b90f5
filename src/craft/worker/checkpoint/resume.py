"""Begin a job's first loop: from a checkpoint if requested, else anew, with all workers.

Input: ``--resume``, the script's ``start_step``, a restart that the lighthouse decided. Output: a rollback, or a refusal.
``CheckpointLifecycle`` calls it on the main thread, before the first step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from craft.protocol.errors import Refused, SnapshotError, SnapshotMissing
from craft.protocol.messages import Restoration
from craft.snapshots.state.leaves import Stateful
from craft.snapshots.store.manifest import Manifest
from craft.worker.checkpoint.rollback import Rollback
from craft.worker.checkpoint.store_claim import StoreClaim
from craft.worker.membership.participant import Participant

logger = logging.getLogger(__name__)


class Resume:
    """Decides where a job with a place for checkpoints begins."""

    def __init__(self, participant: Participant, rollback: Rollback, store: StoreClaim, resume: str | None) -> None:
        """``resume``: "auto", a step, or None to begin anew."""
        self._participant = participant
        self._rollback = rollback
        self._candidates = rollback.candidates
        self._store = store
        self._resume = resume

    def begin(self, again: Restoration | None) -> None:
        """Begin from a checkpoint if requested, with all workers; refuse impossible requests.

        ``again``: the job restarted by itself. A script whose ``start_step`` is later than any checkpoint continues from the
        state it has loaded itself. Raises GroupError if a worker is lost meanwhile.
        """
        if self._participant.ledger.rewinds:
            # Done, before a worker was lost.
            return
        start_step = self._participant.start_step
        wanted = self._candidates.named = int(self._resume) if self._resume not in (None, "auto") else None
        if again is not None:
            self._begin_again(again)
            return
        self._store.check_writable()
        try:
            if self._resume is None:
                self._check_fresh()
                self._store.claim()
                return
            problem = self._rollback.prepare(wanted, next_branch=False, at_least=start_step)
            if problem is None:
                if start_step:
                    logger.info("--resume: a checkpoint goes before job.steps(start_step=%d)", start_step)
                self._store.claim()
                self._participant.go_back()
                return
            listed = self._candidates.listed()
        except SnapshotError as error:
            raise Refused(f"checkpoints in {self._candidates.url} cannot be read: {error}") from error
        if wanted is not None:
            steps = ", ".join(str(each.step) for each in listed) or "none"
            raise Refused(f"--resume {wanted}: {problem}; there are: {steps}")
        self._begin_anew(problem, listed, start_step)

    def _check_fresh(self) -> None:
        """Raise Refused if a new job would write among another job's checkpoints."""
        if listed := self._candidates.listed():
            raise Refused(
                f"{self._candidates.url} holds checkpoints already, the newest of step {listed[0].step}: go on from there"
                " with --resume, or choose another place"
            )

    def _begin_anew(self, problem: str, listed: list[Manifest], start_step: int) -> None:
        """Begin without a checkpoint, unless that would discard data that can perhaps be repaired."""
        if start_step and not self._candidates.rejected and all(each.step < start_step for each in listed):
            logger.info(
                "--resume: no checkpoint is of step %d or later: the job goes on from there, with what the script has loaded",
                start_step,
            )
            self._store.claim()
            return
        if listed or self._candidates.rejected:
            raise Refused(
                f"--resume: {problem}: repair or remove what is there, or start without --resume in another place"
            )
        self._store.claim()
        self._store.warn_of_rests()

    def _begin_again(self, again: Restoration) -> None:
        """Begin from the newest checkpoint of the job's history; anew only where that was decided.

        Raises SnapshotMissing if no checkpoint is usable: a fault, since there was one.
        """
        # A separate branch that has no checkpoint yet begins where it began.
        wanted = self._candidates.named if again.checkpoint is None else None
        problem = self._rollback.prepare(wanted, next_branch=False, again=again)
        if problem is not None and (again.checkpoint is not None or self._candidates.rejected):
            raise SnapshotMissing(f"the job cannot begin again: {problem}")
        if again.checkpoint is None:
            # The workers that began before may not have come to this.
            self._store.claim()
        if problem is None:
            self._participant.go_back()


def forgotten_start_step(registered: Mapping[str, Stateful]) -> str | None:
    """Return a warning if a registered optimizer or scheduler has stepped before the first step; else None.

    Pretrained weights come without such state.
    """
    for name, item in registered.items():
        if isinstance(item, torch.optim.Optimizer):
            steps = max((_steps_of(state) for state in item.state.values()), default=0)
        elif isinstance(item, torch.optim.lr_scheduler.LRScheduler):
            steps = _epochs_of(item)
        else:
            continue
        if steps > 0:
            return _warning(name, item, steps)
    return None


def _epochs_of(scheduler: torch.optim.lr_scheduler.LRScheduler) -> int:
    """Return how often a scheduler has stepped; a ``ChainedScheduler`` has no count, so use those inside it."""
    inside = getattr(scheduler, "_schedulers", ())
    return int(getattr(scheduler, "last_epoch", max(map(_epochs_of, inside), default=0)))


def _warning(name: str, item: Any, steps: int) -> str:
    done = f"has made {steps} steps" if _knows(item) else "has made steps"
    return (
        f"{name} ({type(item).__qualname__}) {done} already, and job.steps begins at step 0, with the first sample. If the script"
        " goes on from its own file, give job.steps(start_step=N) the number of steps that it had done"
    )


def _knows(item: Any) -> bool:
    """Return whether the count is of optimizer updates: SGD does not count, and schedulers may count epochs."""
    return isinstance(item, torch.optim.Optimizer) and any("step" in state for state in item.state.values())


def _steps_of(state: Any) -> int:
    """Return an optimizer's steps for one parameter; 1 if it does not count them."""
    if "step" in state:
        return int(state["step"])
    return int(isinstance(state.get("momentum_buffer"), torch.Tensor))
