"""The user's loop: ``for step in job.steps(...)``, and in it ``for batch in step``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from craft.protocol.activity import Phase
from craft.protocol.errors import ConfigError
from craft.worker import seeds
from craft.worker.bits import PROBE
from craft.worker.data import ENDED
from craft.worker.injections import strike
from craft.worker.meeting import Left
from craft.worker.points import reach
from craft.worker.scalars import checked

if TYPE_CHECKING:
    from craft.worker.training import Training


class Step:
    """One optimizer update. Iterating over it gives the microbatches that this worker computes, perhaps none.

    When the iteration ends, the step is committed and every ``p.grad`` is the mean over the global batch.
    """

    _company: None = None
    _call: None = None
    """In a step of CRAFT's own, calls to all workers are made between the steps only."""

    def __init__(self, training: Training, number: int) -> None:
        self._training = training
        self.number = number
        """The step's number, from 0."""
        self.metrics: dict[str, float] = {}
        """What was logged, averaged over the global batch; filled when the inner loop has ended."""
        self.microbatch: int | None = None
        """The microbatch that is being computed; None outside of the inner loop."""
        self.done = False
        self._entered = False
        self._scalars: dict[str, float | torch.Tensor] = {}
        self._said: list[str] = []
        """Of this microbatch, by an adapter."""

    @property
    def _place(self) -> tuple[int, int | None]:
        return self.number, self.microbatch

    @property
    def _done(self) -> bool:
        return self.done

    def log(self, /, **scalars: float | torch.Tensor) -> None:
        """Log scalars of this microbatch; their mean over the global batch is in ``metrics`` afterwards."""
        logged = checked("step.log", scalars)
        if self.microbatch is None:
            self.metrics.update({name: float(value) for name, value in logged.items()})
        else:
            self._scalars |= logged

    def weight(self, n: float | torch.Tensor) -> None:
        """Weigh this microbatch in the mean over the global batch, for example by its tokens; before ``backward()``."""
        if self.microbatch is None:
            raise ConfigError(
                "step.weight(n) belongs into the inner loop: it weighs the microbatch that is being computed"
            )
        value = float(n)
        if not value >= 0 or value == float("inf"):
            raise ConfigError(f"step.weight({value}): a weight is a finite number of at least 0")
        self._training.flight.gradients.weigh(value)

    def __iter__(self) -> Iterator[Any]:
        if self._entered:
            raise ConfigError(f"step {self.number} was iterated twice: each step has one inner loop")
        self._entered = True
        return self._microbatches()

    def _microbatches(self) -> Iterator[Any]:
        training = self._training
        training.begin()
        flight, source = training.flight, training.source
        while (microbatch := training.next_microbatch()) is not None:
            place = 0 if microbatch == PROBE else microbatch
            self.microbatch, self._scalars, self._said = place, {}, []
            training.activity.now(Phase.LOADING, self.number, place)
            data = source.fetch(self.number, place)
            if data is ENDED:
                self.microbatch = None
                flight.hold_empty(microbatch)
                continue
            flight.start(microbatch, source.weight(self.number, place))
            seeds.seed_all(seeds.derive(training.seed, seeds.COMPUTE, self.number, place))
            reach("batch", self.number)
            training.activity.now(Phase.COMPUTING, self.number, place)
            strike(self.number)
            training.passive.reach("batch_start", microbatch=place)
            yield data
            self.microbatch = None
            scalars = {name: float(value) for name, value in self._scalars.items()}
            more = microbatch == PROBE or source.more(self.number + 1, place)
            flight.hold(microbatch, scalars, more, self._said)
            training.passive.reach("after_backward", microbatch=place)
        self.metrics = training.committed(self.number)
        self.done = True
        seeds.seed_all(seeds.derive(training.seed, seeds.UPDATE, self.number))


def say_aside(step: Step, text: str) -> None:
    """For adapters: have ``text`` travel with the microbatch that is being computed, beside what it logs."""
    step._said.append(text)


def said_aside(step: Step) -> tuple[str, ...]:
    """What was said in whichever microbatch of a step whose inner loop has ended: the same on every worker."""
    last = step._training.handover.last
    assert step.done and last is not None
    return last.combined.said


class Steps:
    """The outer loop. Ends when all steps are committed, the streams have ended, or the script asked to stop."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def __iter__(self) -> Iterator[Step]:
        training = self._training
        try:
            training.start()
            while training.wants_more():
                step = Step(training, training.applied)
                training.current = step
                # Whoever begins here, as one that joins does, has drawn nothing in the steps before.
                seeds.seed_all(seeds.derive(training.seed, seeds.BEGIN, step.number))
                yield step
                if training.finished:
                    break
                if not step.done:
                    # Where the loop was left is no fault of a microbatch's: it would be left there by the next worker, too.
                    step.microbatch = None
                    raise ConfigError(
                        f"step {step.number} was not iterated to its end:"
                        " `for batch in step` must run until it stops by itself"
                    )
            training.end()
        except Left:
            training.course.leave()
            raise
        finally:
            training.close()


class Driven:
    """The same loop, for a framework whose own loop asks for one step after the other, and may end before it does."""

    def __init__(self, steps: Steps) -> None:
        self._training = steps._training
        self._steps = iter(steps)
        self._step: Step | None = None
        self.ended = False

    def next(self) -> Step | None:
        """The next step, or the same one again while its inner loop has not begun; None: there is none any more."""
        if not self.ended and (self._step is None or self._step._entered):
            self._step = next(self._steps, None)
            self.ended = self._step is None
        return self._step

    @property
    def between_steps(self) -> bool:
        """Whether all workers are at the same place, after the inner loop: there they may call each other."""
        return not self.ended and self._step is not None and self._step.done

    def finish(self) -> None:
        """The framework's loop is over, on every worker after the same step."""
        if not self.ended:
            self._training.finished = True
            self.ended = next(self._steps, None) is None
