"""The user's loop: ``for step in job.steps(...)``, and in it ``for batch in step``."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import torch

from craft.protocol.errors import ConfigError
from craft.worker.api.step_work import StepWork
from craft.worker.data import rng
from craft.worker.loop.inner_loop.microbatch import ScriptNotes
from craft.worker.report.metrics import checked
from craft.worker.state.carried_state import CarriedLane, carry

if TYPE_CHECKING:
    from craft.worker.loop.training_loop import TrainingLoop


class Step:
    """One optimizer update. Iterating over it yields the microbatches that this worker computes, possibly none.

    When the iteration ends, the step is committed and every ``p.grad`` is the mean over the global batch.
    """

    _company: None = None
    _call: None = None
    """In ``job.steps``, collective calls are made between steps only."""

    def __init__(self, training: TrainingLoop, number: int) -> None:
        self._training = training
        self.number = number
        """Number of the step, from 0."""
        self.metrics: dict[str, float] = {}
        """Means of the logged scalars over the global batch; filled when the inner loop ends."""
        self.done = False
        self.microbatch: int | None = None
        """Microbatch being computed; None outside the inner loop."""
        self.notes = ScriptNotes()
        self._entered = False

    @property
    def _place(self) -> tuple[int, int | None]:
        return self.number, self.microbatch

    @property
    def _done(self) -> bool:
        return self.done

    @property
    def _is_ahead(self) -> bool:
        """Whether the inner loop has not begun: all workers are then at the same point, as they are after it."""
        return not self._entered

    @property
    def last_of_epoch(self) -> bool:
        """Whether the pass over the data ends with this step."""
        return self._training.source.is_last_of_epoch(self.number)

    def log(self, /, **scalars: float | torch.Tensor) -> None:
        """Log scalars of this microbatch; ``metrics`` has their mean over the global batch afterwards."""
        logged = checked("step.log", scalars)
        if self.microbatch is None:
            self.metrics.update({name: float(value) for name, value in logged.items()})
        else:
            self.notes.scalars |= logged

    def weight(self, n: float | torch.Tensor) -> None:
        """Set this microbatch's weight in the global mean, for example its tokens; call it before ``backward()``."""
        if self.microbatch is None:
            raise ConfigError(
                "step.weight(n) belongs into the inner loop: it weighs the microbatch that is being computed"
            )
        value = float(n)
        if not value >= 0 or value == float("inf"):
            raise ConfigError(f"step.weight({value}): a weight is a finite number of at least 0")
        self._training.exchange.gradients.weigh(value)
        self._training.checks.weighed()

    def carry(self, /, *, reset: bool = False, **initial: Any) -> CarriedLane:
        """Return the values that this microbatch left in the previous step, as attributes.

        ``initial`` gives each value, or a function that makes it, for the first step and after a ``reset``. CRAFT keeps the
        attributes' values when this microbatch ends, detached; the same microbatch of the next step reads them.
        """
        if self.microbatch is None:
            raise ConfigError(
                "step.carry(...) belongs into the inner loop: it carries values from a microbatch to the next step's"
            )
        if self.notes.lane is None:
            self.notes.lane = self._training.lanes.open(self.microbatch)
        return carry(self.notes.lane, initial, reset=reset)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``tensor`` from all microbatches of this step, in order; only this one's have gradients.

        For a loss over the whole global batch: every microbatch computes that loss, and afterwards ``p.grad`` is its gradient.
        The inner loop's body then runs twice for each microbatch. In the first run the other rows have no meaning, and its
        results are not used.
        """
        if self.microbatch is None:
            raise ConfigError("step.gather(tensor) belongs into the inner loop: it gives the rows of all microbatches")
        if self._training.link is not None:
            raise ConfigError(
                "step.gather(tensor) in a sharded replica is not built yet: gather within a microbatch by torch.distributed, and"
                " make microbatches as large as the loss needs"
            )
        size = self._training.source.size_of(self.number)
        return self._training.exchange.gathering.gather(tensor, self.number, self.microbatch, size)

    def __iter__(self) -> Iterator[Any]:
        if self._entered:
            raise ConfigError(f"step {self.number} was iterated twice: each step has one inner loop")
        self._entered = True
        return self._microbatches()

    def _microbatches(self) -> Iterator[Any]:
        training = self._training
        training.begin()
        if not training.behind:
            training.checks.inner_loop_begins()
        yield from training.inner_loop.run(self, StepWork(training, self.number))
        training.checks.inner_loop_ended()
        self.metrics = training.committed(self.number)
        self.done = True
        rng.seed_all(rng.derive(training.seed, rng.UPDATE, self.number))


def say_aside(step: Step, text: str) -> None:
    """Attach ``text`` to the microbatch being computed, for adapters; it travels with the logged scalars."""
    step.notes.said.append(text)


def said_aside(step: Step) -> tuple[str, ...]:
    """Return the texts of all microbatches of a finished step; they are the same on every worker."""
    last = step._training.step_result.last
    assert step.done and last is not None
    return last.combined.said


def has_another(step: Step) -> bool:
    """Return whether this worker expects another microbatch after the current one; for adapters."""
    training = step._training
    return not training.behind and len(training.participant.ledger.pending) > 1


def seed_computing(step: Step) -> None:
    """Seed again after an adapter ran script code between fetching and computing a microbatch."""
    assert step.microbatch is not None
    rng.seed_all(rng.derive(step._training.seed, rng.COMPUTE, step.number, step.microbatch, 1))


def look_at_commit(step: Step, place: int) -> None:
    """Restore the buffers and random numbers that all workers share, for adapters that evaluate within a step."""
    step._training.state.buffers.restore()
    step._training.exchange.gradients.show()
    rng.seed_all(rng.derive(step._training.seed, rng.EVALUATE, step.number, place))


class Steps:
    """The outer loop. It ends when all steps are committed, the streams end, or the script asks to stop.

    A script may also leave it by ``break`` after the inner loop, on every worker after the same step.
    """

    def __init__(self, training: TrainingLoop) -> None:
        self._training = training

    def __iter__(self) -> Generator[Step]:
        training = self._training
        with training.running():
            while training.wants_more():
                step = Step(training, training.applied)
                training.current = step
                # A worker that starts at this step, such as a joiner, has drawn nothing in earlier steps.
                rng.seed_all(rng.derive(training.seed, rng.BEGIN, step.number))
                yield step
                if training.finished:
                    break
                if not step.done:
                    # The microbatch did not cause this: the next worker would leave the loop here, too.
                    step.microbatch = None
                    raise ConfigError(
                        f"step {step.number} was not iterated to its end:"
                        " `for batch in step` must run until it stops by itself"
                    )


class Epoch:
    """One pass over the data: its remaining steps."""

    def __init__(self, steps: Iterator[Step], first: Step) -> None:
        self._steps = steps
        self._step = first
        self._entered = False

    @property
    def number(self) -> int:
        """Number of the pass, from 0."""
        return self._step._training.source.epoch_of(self._step.number)

    def __iter__(self) -> Iterator[Step]:
        if self._entered:
            raise ConfigError(f"epoch {self.number} was iterated twice: each epoch has one loop over its steps")
        self._entered = True
        while True:
            # The script's code after the last step of a pass runs before anything is done at the boundary.
            yield self._step
            if self._step.last_of_epoch or (following := next(self._steps, None)) is None:
                return
            self._step = following

    def check_iterated(self) -> None:
        """Raise ConfigError if the script left the epoch before its end."""
        step = self._step
        if not (self._entered and step.done and step.last_of_epoch):
            raise ConfigError(
                f"epoch {self.number} was left after step {step.number}, before its end: `for step in epoch` must run until it"
                " stops by itself. job.steps(..., steps_per_epoch=N) makes epochs shorter; `break` out of both loops ends the"
                " training"
            )


class Epochs:
    """The loop over passes: ``for epoch in job.epochs(n, data, ...)``, and in it ``for step in epoch``.

    After a resume or a join, it begins with the pass in progress, and that epoch yields its remaining steps.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def __iter__(self) -> Iterator[Epoch]:
        steps = iter(self._steps)
        while (first := next(steps, None)) is not None:
            epoch = Epoch(steps, first)
            yield epoch
            if not self._steps._training.over:
                epoch.check_iterated()


class Driven:
    """The same loop for a framework that asks for one step at a time, and may stop early."""

    def __init__(self, steps: Steps) -> None:
        self._training = steps._training
        self._steps = steps.__iter__()
        self._step: Step | None = None
        self.ended = False
        self._training.checks.driven()
        if self._training.settings.socket is None:
            # A repeat would call the framework's hooks once more, and no other worker's bits could differ.
            self._training.consistency.repeats.give_up()

    def next(self) -> Step | None:
        """Return the next step, or the same one while its inner loop has not begun; None after the last."""
        if not self.ended and (self._step is None or self._step._entered):
            self._step = next(self._steps, None)
            self.ended = self._step is None
        return self._step

    @property
    def epoch(self) -> int | None:
        """The pass over the data that the next step belongs to; None after the last step."""
        step = self.next()
        return None if step is None else self._training.source.epoch_of(step.number)

    @property
    def between_steps(self) -> bool:
        """Whether the inner loop has ended: all workers are then at the same point and may make collective calls."""
        return not self.ended and self._step is not None and self._step.done

    def finish(self) -> None:
        """End the loop because the framework's loop ended, on every worker after the same step."""
        if not self.ended:
            self._training.finished = True
            self.ended = next(self._steps, None) is None

    def close(self) -> None:
        """End threads and connections after an error in the framework's loop. May be called again."""
        self.ended = True
        assert isinstance(self._steps, Generator)
        self._steps.close()
        self._training.give_up()
