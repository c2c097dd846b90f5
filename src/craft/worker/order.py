"""Which samples are in which microbatch of which step: a function of the settings alone."""

from __future__ import annotations

import msgspec
import torch

from craft.worker import seeds


class Place(msgspec.Struct, frozen=True):
    """A microbatch, and the samples in it."""

    step: int
    microbatch: int
    indices: tuple[int, ...] = ()


class Order:
    """The data order over a dataset of ``length`` samples: pass after pass, each with its own seeded shuffle."""

    def __init__(
        self,
        *,
        length: int,
        global_batch: int,
        microbatches: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        steps_per_pass: int | None = None,
    ) -> None:
        """``steps_per_pass``: a pass ends after so many steps at the latest; what is left of it is left out."""
        self._length = length
        self._global_batch = global_batch
        self._microbatches = microbatches
        self._seed = seed
        self._shuffle = shuffle
        whole = length // global_batch if drop_last else -(-length // global_batch)
        self.steps_per_pass = whole if steps_per_pass is None else min(whole, steps_per_pass)
        self._cached: tuple[int, list[int]] | None = None

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_pass

    def batch_size(self, step: int) -> int:
        """Samples in the global batch of ``step``: fewer at the end of a pass."""
        begin = (step % self.steps_per_pass) * self._global_batch
        return min(self._global_batch, self._length - begin)

    def size_of(self, step: int) -> int:
        """Microbatches of ``step`` that have any samples."""
        return min(self._microbatches, self.batch_size(step))

    def count(self, step: int, microbatch: int) -> int:
        """Samples of a microbatch: they differ by at most one, larger ones first."""
        share, extra = divmod(self.batch_size(step), self._microbatches)
        return share + (1 if microbatch < extra else 0)

    def weight(self, step: int, microbatch: int) -> float:
        """A microbatch's weight in the mean over the global batch: exactly 1.0 where all are of one size."""
        return self.count(step, microbatch) / self.count(step, 0)

    def place(self, step: int, microbatch: int) -> Place:
        share, extra = divmod(self.batch_size(step), self._microbatches)
        begin = (step % self.steps_per_pass) * self._global_batch + microbatch * share + min(microbatch, extra)
        samples = self._pass(self.epoch_of(step))[begin : begin + self.count(step, microbatch)]
        return Place(step, microbatch, tuple(samples))

    def _pass(self, number: int) -> list[int]:
        if self._cached is None or self._cached[0] != number:
            if self._shuffle:
                generator = torch.Generator().manual_seed(seeds.derive(self._seed, seeds.ORDER, number))
                order: list[int] = torch.randperm(self._length, generator=generator).tolist()
            else:
                order = list(range(self._length))
            self._cached = (number, order)
        return self._cached[1]
