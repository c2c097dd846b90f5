"""Where microbatches come from: a map-style dataset (with or without loader processes), or streams.

A microbatch's data depends on its place alone: generators are seeded from (job seed, step, microbatch) before it is
fetched, whoever fetches it and in whichever process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from craft.worker.data import rng
from craft.worker.data.sample_order import MicrobatchSamples, Position, SampleOrder
from craft.worker.data.samplers import BatchOrder

Collate = Callable[[list[Any]], Any]

ENDED = object()
"""What a stream gives once it has nothing more."""


class Source(Protocol):
    """Gives the data of a microbatch."""

    def size_of(self, step: int) -> int:
        """Number of microbatches of ``step``; 0 past the end."""

    def weight(self, step: int, microbatch: int) -> float:
        """A microbatch's weight in the mean, unless the user sets one."""

    def samples(self, step: int, microbatch: int) -> int | None:
        """How many samples are in a microbatch; None where only the script knows."""

    def expect(self, step: int, share: tuple[int, ...]) -> None:
        """``share`` is this worker's part of ``step``, and most likely of the steps that follow."""

    def fetch(self, step: int, microbatch: int) -> Any:
        """Return the data of a microbatch, or ENDED."""

    def more(self, step: int, microbatch: int) -> bool:
        """Whether the microbatch has data in ``step``; for streams, by looking ahead."""

    def epoch_of(self, step: int) -> int:
        """The pass over the data that ``step`` is in."""

    def ends_epoch(self, step: int) -> int | None:
        """The pass that ends with ``step``; None: it goes on, or that is not known here. Called for steps that are computed."""

    def position(self, step: int) -> Position | None:
        """Where a worker that joins at ``step`` begins to read; the same on every worker. None: the settings say it all."""

    def seek(self, position: Position) -> None:
        """Take what ``position`` gave on another worker, or earlier."""

    def extend(self, steps: int) -> None:
        """There are so many more steps than was said."""

    def close(self) -> None:
        """End loader processes."""


class Fetcher(Dataset[Any]):
    """Fetches a whole microbatch as one item, so that a loader process can do it, with its own seed."""

    def __init__(self, dataset: Any, collate: Collate, seed: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed

    def __getitem__(self, place: MicrobatchSamples) -> tuple[tuple[int, int], Any]:
        rng.seed_all(rng.derive(self._seed, rng.DATA, place.step, place.microbatch))
        if hasattr(self._dataset, "__getitems__"):
            samples = self._dataset.__getitems__(list(place.indices))
        else:
            samples = [self._dataset[index] for index in place.indices]
        return (place.step, place.microbatch), self._collate(samples)


class Ahead(Sampler[MicrobatchSamples]):
    """Feeds loader processes with the microbatches that this worker will most likely need, urgent ones first."""

    def __init__(self, order: SampleOrder | BatchOrder, total_steps: int | None) -> None:
        self._order = order
        self._total_steps = total_steps
        self._urgent: deque[MicrobatchSamples] = deque()
        self._share: tuple[int, ...] = ()
        self._next = (0, 0)
        self.issued: set[tuple[int, int]] = set()
        """What was given to the loader processes and not been used yet."""
        self._used: set[tuple[int, int]] = set()

    def expect(self, step: int, share: tuple[int, ...]) -> None:
        """From ``step`` on, fetch ``share`` of each step."""
        if share != self._share:
            self._share = share
            self._next = (step, 0)
        self.issued = {key for key in self.issued if key[0] >= step}
        self._used = {key for key in self._used if key[0] >= step}

    def extend(self, steps: int) -> None:
        if self._total_steps is not None:
            self._total_steps += steps

    def use(self, step: int, microbatch: int) -> None:
        """It has arrived and is used: not to be fetched again unless it is asked for."""
        self.issued.discard((step, microbatch))
        self._used.add((step, microbatch))

    def urge(self, step: int, microbatch: int) -> None:
        self._urgent.append(self._order.place(step, microbatch))

    def __iter__(self) -> Iterator[MicrobatchSamples]:
        while True:
            # Nothing to fetch ahead: an empty place keeps the loader's pipeline going.
            place = (self._urgent.popleft() if self._urgent else self._upcoming()) or MicrobatchSamples(-1, -1)
            self.issued.add((place.step, place.microbatch))
            yield place

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
                place = self._order.place(*key)
                if place.indices:
                    return place
        return None


class MapSource:
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
    ) -> None:
        self._order = order
        self._total_steps = total_steps
        self._fetcher = Fetcher(dataset, collate or default_collate, seed)
        self._fetched: dict[tuple[int, int], Any] = {}
        self._ahead = Ahead(order, total_steps)
        self._loader: Iterator[Any] | None = None
        self._num_workers = num_workers
        self._loader_options = loader_options

    def size_of(self, step: int) -> int:
        return self._order.size_of(step) if self._total_steps is None or step < self._total_steps else 0

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
        if self._total_steps is not None:
            self._total_steps += steps
            self._ahead.extend(steps)

    def expect(self, step: int, share: tuple[int, ...]) -> None:
        self._order.leave_behind(step)
        self._ahead.expect(step, share)
        self._fetched = {key: data for key, data in self._fetched.items() if key[0] >= step}

    def fetch(self, step: int, microbatch: int) -> Any:
        place = self._order.place(step, microbatch)
        if not place.indices:
            # A batch sampler's batch may have fewer samples than there are microbatches.
            return ENDED
        if self._num_workers == 0:
            return self._fetcher[place][1]
        key = (step, microbatch)
        loader = self._start()
        if key not in self._ahead.issued:
            self._ahead.urge(step, microbatch)
        while key not in self._fetched:
            (got_step, got_microbatch), data = next(loader)
            if got_step >= step:
                self._fetched[got_step, got_microbatch] = data
        self._ahead.use(step, microbatch)
        return self._fetched.pop(key)

    def _start(self) -> Iterator[Any]:
        if self._loader is None:
            loader: DataLoader[Any] = DataLoader(
                _OrNothing(self._fetcher),
                sampler=self._ahead,
                batch_size=None,
                # By default it would turn the user's tuples into lists and arrays into tensors.
                collate_fn=as_it_is,
                num_workers=self._num_workers,
                **self._loader_options,
            )
            self._loader = iter(loader)
        return self._loader

    def close(self) -> None:
        self._loader = None


def as_it_is(item: Any) -> Any:
    """Return an item unchanged: what a loader is to do with it."""
    return item


class _OrNothing(Dataset[Any]):
    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    def __getitem__(self, place: MicrobatchSamples) -> tuple[tuple[int, int], Any]:
        return self._fetcher[place] if place.step >= 0 else ((-1, -1), None)
