"""Map steps and microbatches to samples: a function of the settings alone."""

from __future__ import annotations

import msgspec
import torch

from craft.worker.data import rng


class MicrobatchSamples(msgspec.Struct, frozen=True):
    """The samples of one microbatch."""

    step: int
    microbatch: int
    indices: tuple[int, ...] = ()


class Position(msgspec.Struct, frozen=True):
    """A place to begin reading in data whose passes have no known length; it travels with the state."""

    epoch: int = 0
    first_step: int = 0
    """The first step of that pass."""
    step: int = 0
    """The step whose data comes next."""
    state: bytes = b""
    """The data's ``state_dict`` there, packed; empty: the begin of the pass."""


def cut(samples: int, parts: int, part: int) -> tuple[int, int]:
    """Return the begin and length of a part of ``samples``: lengths differ by at most one, larger parts first."""
    share, extra = divmod(samples, parts)
    return part * share + min(part, extra), share + (1 if part < extra else 0)


class SampleOrder:
    """The order of a dataset of ``length`` samples: pass after pass, each with another seeded shuffle."""

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
        batch: int | None = None,
        samples_per_pass: int | None = None,
    ) -> None:
        """``steps_per_pass`` and ``samples_per_pass``: limits after which the rest of a pass is left out.

        ``batch``: the samples of every microbatch; the last step of a pass then has fewer microbatches, not smaller ones.
        """
        self._length = length
        self._used = length if samples_per_pass is None else min(length, samples_per_pass)
        self._batch = batch
        self._global_batch = global_batch
        self.microbatches = microbatches
        self._seed = seed
        self._shuffle = shuffle
        steps = self._used // global_batch if drop_last else -(-self._used // global_batch)
        self.steps_per_pass = steps if steps_per_pass is None else min(steps, steps_per_pass)
        self._cached: tuple[int, list[int]] | None = None

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_pass

    def batch_size(self, step: int) -> int:
        """Return the samples in the global batch of ``step``: fewer at the end of a pass."""
        begin = (step % self.steps_per_pass) * self._global_batch
        return min(self._global_batch, self._used - begin)

    def size_of(self, step: int) -> int:
        """Return the number of microbatches of ``step`` that have samples."""
        samples = self.batch_size(step)
        return min(self.microbatches, samples) if self._batch is None else -(-samples // self._batch)

    def count(self, step: int, microbatch: int) -> int:
        """Return the number of samples of a microbatch."""
        return self._cut(step, microbatch)[1]

    def _cut(self, step: int, microbatch: int) -> tuple[int, int]:
        """Return where a microbatch begins in its step, and its number of samples."""
        if self._batch is None:
            return cut(self.batch_size(step), self.microbatches, microbatch)
        begin = microbatch * self._batch
        return begin, max(0, min(self._batch, self.batch_size(step) - begin))

    def weight(self, step: int, microbatch: int) -> float:
        """Return a microbatch's weight in the mean over the global batch: exactly 1.0 if all have one size."""
        return self.count(step, microbatch) / self.count(step, 0)

    def samples_of(self, step: int, microbatch: int) -> MicrobatchSamples:
        offset, count = self._cut(step, microbatch)
        begin = (step % self.steps_per_pass) * self._global_batch + offset
        return MicrobatchSamples(step, microbatch, tuple(self._pass(self.epoch_of(step))[begin : begin + count]))

    def has(self, step: int) -> bool:
        """Whether there is data for ``step``: always, passes have no end."""
        return True

    def ends_epoch(self, step: int) -> int | None:
        """Return the pass that ends with ``step``; None: none does."""
        epoch = self.epoch_of(step)
        return epoch if self.epoch_of(step + 1) != epoch else None

    def forget_before(self, step: int) -> None:
        """Drop what only steps before ``step`` need."""

    def position(self, step: int) -> Position | None:
        """Return what a worker that joins at ``step`` needs besides the settings: nothing."""
        return None

    def seek(self, position: Position) -> None:
        """Continue from what ``position`` gave on another worker."""

    def _pass(self, number: int) -> list[int]:
        if self._cached is None or self._cached[0] != number:
            if self._shuffle:
                generator = torch.Generator().manual_seed(rng.derive(self._seed, rng.ORDER, number))
                order: list[int] = torch.randperm(self._length, generator=generator).tolist()
            else:
                order = list(range(self._length))
            self._cached = (number, order)
        return self._cached[1]
