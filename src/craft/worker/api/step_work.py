"""The microbatches of one step of ``job.steps``, as its inner loop computes them."""

from __future__ import annotations

from typing import Any

from craft.protocol.errors import ConfigError
from craft.worker.loop.inner_loop.microbatch import ScriptNotes
from craft.worker.loop.training_loop import TrainingLoop
from craft.worker.monitor.repeated_microbatch import is_extra, is_repeat, place_of
from craft.worker.state.carried_state import copy_of


class StepWork:
    """A ``MicrobatchWork``: what the step runner wants computed. Owned by the main thread."""

    def __init__(self, training: TrainingLoop, step: int) -> None:
        self._training = training
        self._step = step
        self._runner = training.runner
        self._source = training.source
        self._gathering = training.exchange.gathering
        self._again: dict[int, Any] = {}
        """Copies of the data of microbatches that are computed twice, where it can be copied."""

    def next_microbatch(self) -> int | None:
        return self._training.next_microbatch()

    def fetch(self, microbatch: int) -> Any:
        if microbatch in self._again:
            data = self._again.pop(microbatch)
        else:
            fetch = self._source.again if is_repeat(microbatch) else self._source.fetch
            data = fetch(self._step, place_of(microbatch))
        gathering = self._gathering
        first = (gathering.in_use or gathering.expected) and not gathering.complete
        if first and (copied := copy_of(data)) is not None:
            self._again[microbatch] = copied
        return data

    def start(self, microbatch: int, weight: float) -> None:
        self._runner.start(microbatch, weight)
        if self._training.checks.looks_at_losses:
            self._look_at_losses(place_of(microbatch))

    def _look_at_losses(self, microbatch: int) -> None:
        """Have the checks inspect the losses that the script calls ``backward()`` on, in the first step."""
        step, participant = self._step, self._training.participant
        sizes = {each: self._source.samples(step, each) for each in range(self._source.size_of(step))}
        self._training.checks.microbatch(sizes, microbatch, len(participant.ledger.share), participant.slots)

    def hold(self, microbatch: int, notes: ScriptNotes) -> bool:
        if self._gathering.in_first_pass:
            self._runner.pass_over(microbatch)
            return False
        place = place_of(microbatch)
        self._gathering.finished(place)
        scalars = {name: float(value) for name, value in notes.scalars.items()}
        more = is_extra(microbatch) or self._source.more(self._step + 1, place)
        carried = notes.lane._left() if notes.lane is not None else None
        self._runner.hold(microbatch, scalars, more, notes.said, carried)
        return True

    def hold_empty(self, microbatch: int) -> None:
        if (split := self._training.split).parts > 1:
            # Its other workers may have data for theirs, and would wait for this one in the forward pass.
            raise ConfigError(
                f"the stream of part {split.part} (of {split.parts}) of microbatch {place_of(microbatch)} ended at step"
                f" {self._step}: in a sharded replica all workers compute together, and streams must not end before the job does;"
                " give job.steps(steps=...) no more steps than each stream has items"
            )
        self._runner.hold_empty(microbatch)
