"""Orders that a sampler draws: the draw of pass e depends on (job seed, e), not on the worker.

Only the main thread draws; other threads may call ``size_of``, which never draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from craft.protocol.errors import ConfigError
from craft.worker.data import rng
from craft.worker.data.sample_order import MicrobatchSamples, Position, SampleOrder, cut

_BY_GENERATOR = (BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers of torch whose draw depends only on their generator."""


class Draws:
    """The draws of a sampler, by pass."""

    def __init__(self, sampler: Iterable[Any], seed: int) -> None:
        self._sampler = sampler
        self._seed = seed
        self._drawn: dict[int, list[Any]] = {}
        self._next = 0
        # Any other sampler may keep state between passes: it must draw every pass in turn, as in a run of one process.
        self._by_number = hasattr(sampler, "set_epoch") or all(type(each) in _BY_GENERATOR for each in _nested(sampler))

    @property
    def name(self) -> str:
        return type(self._sampler).__qualname__

    def __getitem__(self, number: int) -> list[Any]:
        """Return what the sampler draws in pass ``number``."""
        if number not in self._drawn:
            while not self._by_number and self._next < number:
                drawn = self._draw(self._next)
                if self._next == number:
                    # A step that is redone after a loss may be in the pass before.
                    self._drawn[number - 1] = drawn
            self._drawn[number] = self._draw(number)
        return self._drawn[number]

    def forget_before(self, number: int) -> None:
        """Drop the passes before ``number``."""
        if len(self._drawn) > 1:
            self._drawn = {each: drawn for each, drawn in self._drawn.items() if each >= number}

    def _draw(self, number: int) -> list[Any]:
        if number < self._next and not self._by_number:
            raise ConfigError(
                f"the order of pass {number} is needed again, and {self.name} cannot draw it again: give it a method"
                " set_epoch(epoch) on which its draw depends"
            )
        self._next = number + 1
        seed = rng.derive(self._seed, rng.ORDER, number)
        own: list[tuple[Any, Any]] = []
        with rng.preserved():
            rng.seed_host(seed)
            for place, each in enumerate(_nested(self._sampler)):
                if isinstance(getattr(each, "generator", 0), torch.Generator | None):
                    own.append((each, each.generator))
                    each.generator = torch.Generator().manual_seed(rng.derive(seed, rng.ORDER, place))
                if hasattr(each, "set_epoch"):
                    each.set_epoch(number)
            try:
                return list(self._sampler)
            finally:
                for each, generator in own:
                    each.generator = generator


@contextmanager
def reseeded(sampler: Any, seed: int) -> Iterator[None]:
    """Replace the generators of a sampler and its inner samplers by ones that are seeded from ``seed``."""
    own = [each for each in _nested(sampler) if isinstance(getattr(each, "generator", None), torch.Generator)]
    before = [each.generator for each in own]
    for place, each in enumerate(own):
        each.generator = torch.Generator().manual_seed(rng.derive(seed, rng.ORDER, place))
    try:
        yield
    finally:
        for each, generator in zip(own, before, strict=True):
            each.generator = generator


def _nested(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and its inner samplers."""
    yield sampler
    for value in vars(sampler).values() if hasattr(sampler, "__dict__") else ():
        if isinstance(value, Sampler) and value is not sampler:
            yield from _nested(value)


class SampledOrder(SampleOrder):
    """Samples in the order in which a sampler of fixed length draws them, cut into global batches."""

    def __init__(self, sampler: Any, *, seed: int, **more: Any) -> None:
        super().__init__(length=len(sampler), seed=seed, shuffle=False, **more)
        self._draws = Draws(sampler, seed)

    def forget_before(self, step: int) -> None:
        self._draws.forget_before(self.epoch_of(step))

    def _pass(self, number: int) -> list[int]:
        drawn = self._draws[number]
        if len(drawn) != self._length:
            raise ConfigError(
                f"{self._draws.name} has a length of {self._length} and drew {len(drawn)} samples in pass {number}: its"
                " __len__ must return how many it draws, or be left out"
            )
        return drawn


class BatchOrder:
    """The order of a batch sampler: each of its batches is a global batch. A pass has a known length once it is drawn."""

    def __init__(self, draws: Draws, *, microbatches: int, epochs: int | None, steps_per_pass: int | None) -> None:
        self._draws = draws
        self.microbatches = microbatches
        self._epochs = epochs
        self._steps_per_pass = steps_per_pass
        self._starts = [(0, 0)]
        """(first step, pass) of consecutive passes; the last one may not be drawn yet."""

    def _find(self, step: int) -> tuple[int, int, list[Any]] | None:
        """Return (first step, number, batches) of the pass that ``step`` is in; None past the last one."""
        while True:
            first, number = next(each for each in reversed(self._starts) if each[0] <= step)
            if self._epochs is not None and number >= self._epochs:
                return None
            batches = self._draws[number][: self._steps_per_pass]
            if not batches:
                raise ConfigError(f"{self._draws.name} gave no batch in pass {number}: there is nothing to train on")
            if step < first + len(batches):
                return first, number, batches
            self._starts.append((first + len(batches), number + 1))

    def _batch(self, step: int) -> list[int]:
        found = self._find(step)
        return list(found[2][step - found[0]]) if found is not None else []

    def has(self, step: int) -> bool:
        return self._find(step) is not None

    def epoch_of(self, step: int) -> int:
        found = self._find(step)
        return found[1] if found is not None else self._starts[-1][1]

    def ends_epoch(self, step: int) -> int | None:
        found = self._find(step)
        return found[1] if found is not None and step + 1 == found[0] + len(found[2]) else None

    def size_of(self, step: int) -> int:
        return self.microbatches

    def count(self, step: int, microbatch: int) -> int:
        return cut(len(self._batch(step)), self.microbatches, microbatch)[1]

    def weight(self, step: int, microbatch: int) -> float:
        return self.count(step, microbatch) / self.count(step, 0)

    def samples_of(self, step: int, microbatch: int) -> MicrobatchSamples:
        batch = self._batch(step)
        begin, count = cut(len(batch), self.microbatches, microbatch)
        return MicrobatchSamples(step, microbatch, tuple(batch[begin : begin + count]))

    def forget_before(self, step: int) -> None:
        while len(self._starts) > 1 and self._starts[1][0] < step:
            del self._starts[0]
        self._draws.forget_before(self._starts[0][1])

    def position(self, step: int) -> Position | None:
        if step <= 0:
            return None
        found = self._find(step - 1)
        first, number = (found[0], found[1]) if found is not None else self._starts[-1]
        return Position(epoch=number, first_step=first, step=first)

    def seek(self, position: Position) -> None:
        # Not backwards: after a rollback the data continues where it was.
        if position.first_step > self._starts[-1][0]:
            self._starts = [(position.first_step, position.epoch)]


class Chunked:
    """Batches of ``size`` from a sampler without a length."""

    def __init__(self, sampler: Iterable[int], size: int, drop_last: bool) -> None:
        self.sampler = sampler
        self._size = size
        self._drop_last = drop_last
        if hasattr(sampler, "set_epoch"):
            self.set_epoch = sampler.set_epoch

    def __iter__(self) -> Iterator[list[int]]:
        drawn = list(self.sampler)
        for begin in range(0, len(drawn), self._size):
            batch = drawn[begin : begin + self._size]
            if len(batch) == self._size or not self._drop_last:
                yield batch
