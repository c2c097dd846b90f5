"""Microbatches of an ``IterableDataset``: every worker reads all of it and uses its share.

The first global batch of the iteration is step 0, cut into microbatches like that of any dataset. The place to begin reading
travels with the state: the begin of the pass, or a later ``state_dict`` of the dataset.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from craft.protocol.errors import ConfigError
from craft.snapshots.state.tree import pack
from craft.worker.data import rng
from craft.worker.data.iterable_reading import NAME, Batch, Maker, Plan, ReadAhead, is_stateful, read
from craft.worker.data.sample_order import Position, cut
from craft.worker.data.sources import ENDED, Source, identity

logger = logging.getLogger(__name__)


class IterableSource(Source):
    """Belongs to the main thread, except for ``size_of``."""

    def __init__(
        self,
        dataset: Any,
        plan: Plan,
        make: Maker,
        *,
        total_steps: int | None,
        loader_options: dict[str, Any] | None,
        pins: bool = False,
    ) -> None:
        """``loader_options``: options of the process that reads ahead; None: the main thread reads."""
        super().__init__(plan.microbatches, total_steps)
        self._dataset = dataset
        self._plan = plan
        self._make = make
        self._loader_options = loader_options
        self._pins = pins
        self._batches: dict[int, Batch] = {}
        """Batches of steps that are not over, by step."""
        self._items: Iterator[Batch] | None = None
        self._next = 0
        """The step that is read next."""
        self._end: int | None = None
        """The number of steps, once it is known."""
        self._passes: list[tuple[int, int]] = []
        """(first step, pass) of passes that were read."""
        self._marks: list[tuple[Position, Any]] = [(Position(), None)]
        """Positions where reading can begin, the oldest first, each with the dataset's state there, not yet packed."""

    # Reading.

    def _reach(self, step: int) -> Batch | None:
        """Read up to ``step``; None: the data ends before it."""
        if step in self._batches:
            return self._batches[step]
        if self._end is not None and step >= self._end:
            return None
        mark = next((each for each in reversed(self._marks) if each[0].step <= step), None)
        if mark is None:
            raise ConfigError(
                f"the data of step {step} cannot be read again: reading continues from {self._marks[0][0].step}"
            )
        if self._items is None or not mark[0].step <= self._next <= step:
            self._open(_packed(mark))
        while self._next <= step:
            assert self._items is not None
            batch = next(self._items, None)
            if batch is None:
                self._end = self._next
                return None
            self._record(batch)
            if batch.step >= step:
                self._batches[batch.step] = batch
        return self._batches[step]

    def _open(self, begin: Position) -> None:
        if self._items is not None and self._loader_options is None and not begin.state and is_stateful(self._dataset):
            raise ConfigError(
                f"{type(self._dataset).__qualname__} was read beyond step {begin.step}, and has no state to return to"
            )
        if begin.step:
            logger.info("reading the dataset from step %d on, in pass %d", begin.step, begin.epoch)
        self._next = begin.step
        if self._loader_options is None:
            self._items = read(self._dataset, self._plan, begin)
            return
        loader: DataLoader[Any] = DataLoader(
            ReadAhead(self._dataset, self._plan, begin, self._make),
            batch_size=None,
            collate_fn=identity,
            num_workers=1,
            # The base seed of a loader process must not depend on where it begins.
            generator=torch.Generator().manual_seed(rng.derive(self._plan.seed, rng.ITERATE)),
            **self._loader_options,
        )
        self._items = iter(loader)

    def _record(self, batch: Batch) -> None:
        """Record the pass of a batch that was read, and the position if reading can begin there."""
        self._next = batch.step + 1
        if not self._passes or self._passes[-1][1] < batch.epoch:
            self._passes.append((batch.first_step, batch.epoch))
        if batch.step == batch.first_step or batch.state is not None:
            position = Position(epoch=batch.epoch, first_step=batch.first_step, step=batch.step)
            if position.step > self._marks[-1][0].step:
                self._marks.append((position, batch.state))
        # Two less: the position of a step may be needed after the next one is read.
        self._drop_marks(batch.step - 2)

    def _drop_marks(self, step: int) -> None:
        """Drop marks that are older than what ``position(step)`` needs."""
        while len(self._marks) > 1 and self._marks[1][0].step < step:
            del self._marks[0]

    # The role ``Source``.

    def _count(self, batch: Batch, microbatch: int) -> int:
        return cut(batch.size, self._plan.microbatches, microbatch)[1]

    def weight(self, step: int, microbatch: int) -> float:
        batch = self._reach(step)
        return self._count(batch, microbatch) / self._count(batch, 0) if batch is not None else 0.0

    def samples(self, step: int, microbatch: int) -> int | None:
        batch = self._batches.get(step)
        return self._count(batch, microbatch) if batch is not None else None

    def expect(self, step: int, share: tuple[int, ...]) -> None:
        self._batches = {each: batch for each, batch in self._batches.items() if each >= step}
        self._drop_marks(step)
        while len(self._passes) > 1 and self._passes[1][0] < step:
            del self._passes[0]

    def fetch(self, step: int, microbatch: int) -> Any:
        batch = self._reach(step)
        if batch is None or not self._count(batch, microbatch):
            return ENDED
        if not batch.collated:
            return self._make(batch, microbatch)
        # A copy: it may be fetched again, and the script may change what it gets.
        data = batch.items[microbatch]
        return pin_memory(data) if self._pins else copy.deepcopy(data)

    def more(self, step: int, microbatch: int) -> bool:
        return self.size_of(step) > 0 and self._reach(step) is not None

    def epoch_of(self, step: int) -> int:
        known = self._next if self._end is None else self._end
        if step >= known and self.size_of(step) and self._end is None:
            with rng.preserved():
                self._reach(step)
        if self._end is not None and step >= self._end:
            return self._passes[-1][1] + 1 if self._passes else 0
        return next((epoch for first, epoch in reversed(self._passes) if first <= step), 0)

    def ends_epoch(self, step: int) -> int | None:
        if (first := next((each for each in self._passes if each[0] == step + 1), None)) is not None:
            return first[1] - 1
        return self._passes[-1][1] if self._end == step + 1 else None

    def position(self, step: int) -> Position | None:
        """Return the newest position before ``step`` that has data to read in the same pass."""
        if step <= 0:
            return None
        if self._next < step:
            with rng.preserved():
                self._reach(step - 1)
        mark = next((each for each in reversed(self._marks) if each[0].step < step), self._marks[0])
        return _packed(mark)

    def seek(self, position: Position) -> None:
        if position.step > self._marks[-1][0].step:
            self._marks.append((position, None))

    def close(self) -> None:
        self._items = None


def _packed(mark: tuple[Position, Any]) -> Position:
    position, state = mark
    if position.state or state is None:
        return position
    return Position(epoch=position.epoch, first_step=position.first_step, step=position.step, state=pack(NAME, state))
