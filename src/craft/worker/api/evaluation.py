"""``job.evaluate``: score a dataset across the workers, each sample once, despite losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from blake3 import blake3
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset, default_collate
from torch.utils.data.distributed import DistributedSampler

from craft.protocol.errors import ConfigError, UnsafeScript
from craft.protocol.values.activity import Phase
from craft.telemetry.fault_points import reach
from craft.worker.api.collectives import gather
from craft.worker.data import rng
from craft.worker.data.samplers import reseeded
from craft.worker.data.sources import Collate
from craft.worker.loop.training_loop import TrainingLoop
from craft.worker.membership.ft_calls import taking_part

Score = Callable[[Any], Mapping[str, Any]]


class _Scored(msgspec.Struct, frozen=True, array_like=True):
    """The scores of one batch."""

    batch: int
    size: int
    values: dict[str, float]


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """One worker's part of an evaluation, sent to the others."""

    samples: bytes
    """Digest of the samples in each batch."""
    scored: list[_Scored]


class Batches:
    """The batches of an evaluation, by number; each has a seed, the same in any process."""

    def __init__(self, data: Any, batch_size: int | None, collate: Collate | None) -> None:
        self._num_workers = 0
        if isinstance(data, DataLoader):
            data, self._indices, collate, self._num_workers = _take_over(data, batch_size, collate)
        else:
            self._indices = _in_order(data, batch_size)
        self._dataset = data
        self._collate = collate or default_collate
        self._seed: tuple[int, int] = (0, 0)

    def __len__(self) -> int:
        return len(self._indices)

    def size(self, batch: int) -> int:
        return len(self._indices[batch])

    def digest(self) -> bytes:
        """Hash the sample numbers of each batch, resolved through any ``Subset``."""
        hasher = blake3()
        for indices in self._indices:
            dataset: Any = self._dataset
            while isinstance(dataset, Subset):
                dataset, indices = dataset.dataset, [dataset.indices[index] for index in indices]
            hasher.update(f"/{indices}".encode())
        return bytes(hasher.digest(length=16))

    def fetch(self, numbers: Sequence[int], seed: int, step: int) -> Iterator[tuple[int, Any]]:
        """Yield each of these batches with its number."""
        self._seed = (seed, step)
        if self._num_workers == 0 or not numbers:
            yield from ((number, self[number]) for number in numbers)
            return
        loader: DataLoader[Any] = DataLoader(
            self,  # type: ignore[arg-type]  # only __getitem__ is used
            sampler=numbers,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=min(self._num_workers, len(numbers)),
        )
        yield from zip(numbers, loader, strict=True)

    def __getitem__(self, number: int) -> Any:
        # A score must not depend on the worker that computes it, nor on earlier computation.
        seed, step = self._seed
        rng.seed_all(rng.derive(seed, rng.EVALUATE, step, number))
        return self._collate([self._dataset[index] for index in self._indices[number]])


def _as_it_is(item: Any) -> Any:
    return item


def _take_over(
    loader: DataLoader[Any], batch_size: int | None, collate: Collate | None
) -> tuple[Any, list[list[int]], Collate, int]:
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise ConfigError(
            "job.evaluate(DataLoader) shares the samples over the workers by their numbers: its dataset needs __getitem__ and"
            " __len__, and the loader a batch_size"
        )
    if batch_size is not None or collate is not None:
        raise ConfigError(
            "job.evaluate(DataLoader, batch_size=..., collate_fn=...): the loader has its own; leave these out"
        )
    batches = loader.batch_sampler
    if type(batches) is BatchSampler and isinstance(batches.sampler, DistributedSampler):
        # Its shards follow the ranks, but CRAFT divides the batches itself: the batches must hold every sample.
        batches = BatchSampler(range(len(loader.dataset)), batches.batch_size, batches.drop_last)  # type: ignore[arg-type]
    indices = [list(batch) for batch in batches]
    if not indices:
        raise ConfigError("job.evaluate: the loader has no batches")
    return loader.dataset, indices, loader.collate_fn, loader.num_workers


def _in_order(dataset: Any, batch_size: int | None) -> list[list[int]]:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"job.evaluate({type(dataset).__qualname__}): a dataset with __getitem__ and __len__, or a DataLoader, is needed"
        )
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"job.evaluate(batch_size={batch_size!r}): batch_size is a whole number of at least 1")
    if len(dataset) == 0:
        raise ConfigError("job.evaluate: the dataset has no samples")
    length = len(dataset)
    return [list(range(begin, min(length, begin + batch_size))) for begin in range(0, length, batch_size)]


_DIFFERENT = (
    "job.evaluate: workers have different samples in the same batch, so that some would be scored twice and others not at all."
    " CRAFT shares the batches over the workers itself: do not cut the data by job.rank, split it with the same seed on every"
    " worker, and use no sampler that draws for one rank, or whose draw depends on earlier ones. A dataset with batch_size=...,"
    " without a sampler, is always shared out right"
)


def evaluate(
    training: TrainingLoop, data: Any, score: Score, batch_size: int | None, collate: Collate | None
) -> dict[str, float]:
    """Divide a dataset over the workers, each sample once; return the sample-weighted mean of the scores."""
    # A loader's sampler may draw: make it draw the same on every worker.
    seed = rng.derive(training.seed, rng.EVALUATE, training.applied)
    rng.seed_all(seed)
    with reseeded(getattr(data, "batch_sampler", None), seed):
        batches = Batches(data, batch_size, collate)
    digest = batches.digest()
    scored: dict[int, _Scored] = {}
    own: dict[int, _Scored] = {}
    buffers = training.state.buffers_now()
    while len(scored) < len(batches):
        missing = [batch for batch in range(len(batches)) if batch not in scored]
        mine = [batch for batch in _share(training, missing) if batch not in own]
        training.activity.now(Phase.EVALUATING, microbatch=mine[0] if mine else None)
        for batch, samples in batches.fetch(mine, training.seed, training.applied):
            training.activity.now(Phase.EVALUATING, microbatch=batch)
            own[batch] = _score(training, score, batch, batches.size(batch), samples)
            # A module that is not in eval() may change its buffers; the change must not outlive the batch.
            buffers.restore()
            reach("scored", training.applied)
        encoded = gather(training, "evaluate", msgspec.msgpack.encode(_Part(digest, list(own.values()))))
        parts = [msgspec.msgpack.decode(part, type=_Part) for part in encoded]
        if len({part.samples for part in parts}) > 1:
            raise UnsafeScript(_DIFFERENT)
        for part in parts:
            scored |= {each.batch: each for each in part.scored}
    # The script's next draws must not depend on which worker scored what.
    rng.seed_all(seed)
    return _mean([scored[batch] for batch in range(len(batches))])


def _share(training: TrainingLoop, batches: list[int]) -> list[int]:
    """Return this worker's part of ``batches``: none while it is catching up, all if it is the only worker left."""
    if training.behind:
        return batches if training.calls.left_alone() else []
    ranks, position = taking_part(training.participant)
    return batches[position :: len(ranks)]


@torch.no_grad()
def _score(training: TrainingLoop, score: Score, batch: int, size: int, samples: Any) -> _Scored:
    rng.seed_all(rng.derive(training.seed, rng.EVALUATE, training.applied, batch))
    values = score(samples)
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"job.evaluate: the function returned a {type(values).__qualname__}: it returns a dict of numbers, the means"
            " over its batch"
        )
    return _Scored(batch, size, {str(name): float(value) for name, value in values.items()})


def _mean(scored: list[_Scored]) -> dict[str, float]:
    sums: dict[str, float] = {}
    sizes: dict[str, int] = {}
    for each in scored:
        for name, value in each.values.items():
            sums[name] = sums.get(name, 0.0) + value * each.size
            sizes[name] = sizes.get(name, 0) + each.size
    return {name: sums[name] / sizes[name] for name in sums}
