"""The role ``Source`` of microbatches; ``StreamSource``, and ``MapSource`` for map-style datasets, with or without processes.

A microbatch's data depends only on its step and number: generators are seeded from (job seed, step, microbatch) before it is
fetched, in whichever worker and process.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from craft.worker.data import rng
from craft.worker.data.data_split import WHOLE, DataSplit
from craft.worker.data.sample_order import MicrobatchSamples, Position, SampleOrder
from craft.worker.data.samplers import BatchOrder

Collate = Callable[[list[Any]], Any]
Stream = Callable[[int, int, int], Iterator[Any]]
"""``stream(microbatch, num_microbatches, start_step)`` returns an iterator over its items."""

ENDED = object()
"""Returned for a microbatch past the end of the data."""


class Source(abc.ABC):
    """Gives the data of a microbatch. The defaults are those of a stream, which has one pass and samples of any kind."""

    def __init__(self, microbatches: int, total_steps: int | None) -> None:
        self._microbatches = microbatches
        self._total_steps = total_steps

    def size_of(self, step: int) -> int:
        """Number of microbatches of ``step``; 0 past the end."""
        return self._microbatches if self._total_steps is None or step < self._total_steps else 0

    def weight(self, step: int, microbatch: int) -> float:
        """Weight of a microbatch in the mean, unless the script sets one."""
        return 1.0

    def samples(self, step: int, microbatch: int) -> int | None:
        """Number of samples in a microbatch; None if only the script knows."""
        return None

    @abc.abstractmethod
    def expect(self, step: int, share: tuple[int, ...]) -> None:
        """Prepare ``share``, this worker's part of ``step`` and most likely of the following steps."""

    @abc.abstractmethod
    def fetch(self, step: int, microbatch: int) -> Any:
        """Return the data of a microbatch, or ENDED."""

    def again(self, step: int, microbatch: int) -> Any:
        """Read the same data once more, without moving what is open for the next steps."""
        return self.fetch(step, microbatch)

    @abc.abstractmethod
    def more(self, step: int, microbatch: int) -> bool:
        """Whether the microbatch has data in ``step``; a stream reads ahead to find out."""

    def epoch_of(self, step: int) -> int:
        """The pass over the data that ``step`` is in."""
        return 0

    def ends_epoch(self, step: int) -> int | None:
        """The pass that ends with ``step``, a computed one; None: none does, or it is not known here."""
        return None

    def position(self, step: int) -> Position | None:
        """Where a worker that joins at ``step`` begins to read, the same on every worker; None: by the settings alone."""
        return None

    def seek(self, position: Position) -> None:  # noqa: B027
        """Continue from what ``position`` gave on another worker, or earlier."""

    def extend(self, steps: int) -> None:
        """Add so many steps to the total."""
        if self._total_steps is not None:
            self._total_steps += steps

    @abc.abstractmethod
    def close(self) -> None:
        """End loader processes."""


class StreamSource(Source):
    """One iterator for each microbatch, opened by the worker that computes it."""

    def __init__(self, stream: Stream, *, microbatches: int, seed: int, total_steps: int | None) -> None:
        super().__init__(microbatches, total_steps)
        self._stream = stream
        self._seed = seed
        self._open: dict[int, tuple[int, Iterator[Any]]] = {}
        """(step of the next item, iterator) by microbatch."""
        self._ahead: dict[tuple[int, int], Any] = {}

    def expect(self, step: int, share: tuple[int, ...]) -> None:
        self._ahead = {key: data for key, data in self._ahead.items() if key[0] >= step}

    def fetch(self, step: int, microbatch: int) -> Any:
        # Not kept: the script may change it. If it is needed again, it is read again.
        key = (step, microbatch)
        return self._ahead.pop(key) if key in self._ahead else self._draw(step, microbatch)

    def more(self, step: int, microbatch: int) -> bool:
        # Read nothing past the last step: the read might block, and its result would be thrown away.
        if self.size_of(step) == 0:
            return False
        self._ahead[step, microbatch] = self.fetch(step, microbatch)
        return self._ahead[step, microbatch] is not ENDED

    def _draw(self, step: int, microbatch: int) -> Any:
        position, iterator = self._open.get(microbatch, (-1, iter(())))
        if position != step:
            iterator = self._open_at(step, microbatch)
        self._open[microbatch] = (step + 1, iterator)
        return self._next_item(iterator, step, microbatch)

    def again(self, step: int, microbatch: int) -> Any:
        return self._next_item(self._open_at(step, microbatch), step, microbatch)

    def _open_at(self, step: int, microbatch: int) -> Iterator[Any]:
        rng.seed_all(rng.derive(self._seed, rng.DATA, step, microbatch))
        return iter(self._stream(microbatch, self._microbatches, step))

    def _next_item(self, iterator: Iterator[Any], step: int, microbatch: int) -> Any:
        # Seeded again: the item must not depend on whether the stream was opened just now.
        rng.seed_all(rng.derive(self._seed, rng.DATA, step, microbatch))
        return next(iterator, ENDED)

    def close(self) -> None:
        self._open = {}


class Fetcher(Dataset[Any]):
    """Fetches a microbatch as one item, so that a loader process can do it, with its seed."""

    def __init__(self, dataset: Any, collate: Collate, seed: int, split: DataSplit = WHOLE) -> None:
        """``split``: the part of each microbatch that is fetched."""
        self._split = split
        self._dataset = dataset
        self._collate = collate
        self._seed = seed

    def __getitem__(self, wanted: MicrobatchSamples) -> tuple[tuple[int, int], Any]:
        if wanted.step < 0:
            # Nothing to fetch ahead, see ``Prefetch``.
            return (-1, -1), None
        rng.seed_all(rng.derive(self._seed, rng.DATA, wanted.step, wanted.microbatch, *self._split.lane))
        indices = self._split.of(wanted.indices)
        if hasattr(self._dataset, "__getitems__"):
            samples = self._dataset.__getitems__(list(indices))
        else:
            samples = [self._dataset[index] for index in indices]
        return (wanted.step, wanted.microbatch), self._collate(samples)


class Prefetch(Sampler[MicrobatchSamples]):
    """Feeds loader processes with the microbatches that this worker will most likely need, urgent ones first."""

    def __init__(self, order: SampleOrder | BatchOrder, total_steps: int | None) -> None:
        self._order = order
        self._total_steps = total_steps
        self._urgent: deque[MicrobatchSamples] = deque()
        self._share: tuple[int, ...] = ()
        self._next = (0, 0)
        self.issued: set[tuple[int, int]] = set()
        """Microbatches that were given to loader processes and are not used yet."""
        self._used: set[tuple[int, int]] = set()

    def expect(self, step: int, share: tuple[int, ...]) -> None:
        """Fetch ``share`` of each step from ``step`` on."""
        if share != self._share:
            self._share = share
            self._next = (step, 0)
        self.issued = {key for key in self.issued if key[0] >= step}
        self._used = {key for key in self._used if key[0] >= step}

    def extend(self, steps: int) -> None:
        if self._total_steps is not None:
            self._total_steps += steps

    def mark_used(self, step: int, microbatch: int) -> None:
        """Do not fetch this microbatch ahead again: it has arrived and is used."""
        self.issued.discard((step, microbatch))
        self._used.add((step, microbatch))

    def add_urgent(self, step: int, microbatch: int) -> None:
        self._urgent.append(self._order.samples_of(step, microbatch))

    def __iter__(self) -> Iterator[MicrobatchSamples]:
        while True:
            # With nothing to fetch ahead, a blank item keeps the loader's pipeline running.
            item = (self._urgent.popleft() if self._urgent else self._upcoming()) or MicrobatchSamples(-1, -1)
            self.issued.add((item.step, item.microbatch))
            yield item

    def _upcoming(self) -> MicrobatchSamples | None:
        while self._share and (self._total_steps is None or self._next[0] < self._total_steps):
            step, position = self._next
            if not self._order.has(step):
                return None
            if position >= len(self._share):
                self._next = (step + 1, 0)
                continue
            self._next = (step, position + 1)
            key = (step, self._share[position])
            if key[1] < self._order.size_of(step) and key not in self.issued and key not in self._used:
                samples = self._order.samples_of(*key)
                if samples.indices:
                    return samples
        return None


class MapSource(Source):
    """Microbatches of a map-style dataset."""

    def __init__(
        self,
        dataset: Any,
        order: SampleOrder | BatchOrder,
        *,
        seed: int,
        total_steps: int | None,
        collate: Collate | None,
        num_workers: int,
        loader_options: dict[str, Any],
        split: DataSplit = WHOLE,
    ) -> None:
        super().__init__(order.microbatches, total_steps)
        self._order = order
        self._fetcher = Fetcher(dataset, collate or default_collate, seed, split)
        self._fetched: dict[tuple[int, int], Any] = {}
        self._prefetch = Prefetch(order, total_steps)
        self._loader: Iterator[Any] | None = None
        self._num_workers = num_workers
        self._loader_options = loader_options

    def size_of(self, step: int) -> int:
        return min(super().size_of(step), self._order.size_of(step))

    def weight(self, step: int, microbatch: int) -> float:
        return self._order.weight(step, microbatch)

    def samples(self, step: int, microbatch: int) -> int | None:
        return self._order.count(step, microbatch)

    def epoch_of(self, step: int) -> int:
        return self._order.epoch_of(step)

    def more(self, step: int, microbatch: int) -> bool:
        return self.size_of(step) > 0 and self._order.has(step)

    def ends_epoch(self, step: int) -> int | None:
        return self._order.ends_epoch(step)

    def position(self, step: int) -> Position | None:
        return self._order.position(step)

    def seek(self, position: Position) -> None:
        self._order.seek(position)

    def extend(self, steps: int) -> None:
        super().extend(steps)
        self._prefetch.extend(steps)

    def expect(self, step: int, share: tuple[int, ...]) -> None:
        self._order.forget_before(step)
        self._prefetch.expect(step, share)
        self._fetched = {key: data for key, data in self._fetched.items() if key[0] >= step}

    def fetch(self, step: int, microbatch: int) -> Any:
        samples = self._order.samples_of(step, microbatch)
        if not samples.indices:
            # A batch sampler's batch may have fewer samples than there are microbatches.
            return ENDED
        if self._num_workers == 0:
            return self._fetcher[samples][1]
        key = (step, microbatch)
        loader = self._start()
        if key not in self._prefetch.issued:
            self._prefetch.add_urgent(step, microbatch)
        while key not in self._fetched:
            (got_step, got_microbatch), data = next(loader)
            if got_step >= step:
                self._fetched[got_step, got_microbatch] = data
        self._prefetch.mark_used(step, microbatch)
        return self._fetched.pop(key)

    def _start(self) -> Iterator[Any]:
        if self._loader is None:
            loader: DataLoader[Any] = DataLoader(
                self._fetcher,
                sampler=self._prefetch,
                batch_size=None,
                # The default would turn the script's tuples into lists and arrays into tensors.
                collate_fn=identity,
                num_workers=self._num_workers,
                **self._loader_options,
            )
            self._loader = iter(loader)
        return self._loader

    def close(self) -> None:
        self._loader = None


def identity(item: Any) -> Any:
    """Return an item unchanged, as a loader's ``collate_fn``."""
    return item
