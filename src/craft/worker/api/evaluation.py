"""``job.evaluate``: score a dataset across the workers, each sample once, despite losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
import torch
from blake3 import blake3
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset, default_collate
from torch.utils.data.distributed import DistributedSampler

from craft.decide.step.replicas import able_replicas
from craft.groups.sharded import fsdp_reset
from craft.protocol.errors import ConfigError, UnsafeScript
from craft.protocol.values.activity import Phase
from craft.telemetry.fault_points import reach
from craft.worker.api.collectives import gather
from craft.worker.data import rng
from craft.worker.data.data_split import WHOLE, DataSplit
from craft.worker.data.samplers import reseeded
from craft.worker.data.sources import Collate
from craft.worker.loop.training_loop import TrainingLoop
from craft.worker.membership.ft_calls import taking_part

Score = Callable[[Any], Mapping[str, Any]]


class _Scored(msgspec.Struct, frozen=True, array_like=True):
    """The scores of one batch, or of one of its parts."""

    batch: int
    size: int
    values: dict[str, float]
    part: int = 0

    @property
    def place(self) -> tuple[int, int]:
        return self.batch, self.part


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """One worker's part of an evaluation, sent to the others."""

    samples: bytes
    """Digest of the samples in each batch."""
    scored: list[_Scored]


class Batches:
    """The batches of an evaluation, by number; each has a seed, the same in any process."""

    def __init__(self, data: Any, batch_size: int | None, collate: Collate | None, split: DataSplit = WHOLE) -> None:
        """``split``: the part of each batch that is fetched, where a batch can be divided evenly."""
        self._split = split
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

    def split(self, batch: int) -> DataSplit:
        """Return which part of a batch is fetched here; all of it, if its parts would have different sizes."""
        return WHOLE if len(self._indices[batch]) % self._split.parts else self._split

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
        split = self.split(number)
        rng.seed_all(rng.derive(seed, rng.EVALUATE, step, number, *split.lane))
        return self._collate([self._dataset[index] for index in split.of(self._indices[number])])


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
        batches = Batches(data, batch_size, collate, training.split)
    digest = batches.digest()
    scored: dict[tuple[int, int], _Scored] = {}
    buffers = training.state.buffers_now()
    while missing := _missing(batches, scored):
        mine = _share(training, missing)
        own: list[_Scored] = []
        training.activity.now(Phase.EVALUATING, microbatch=mine[0] if mine else None)
        with Scoring(training) as scoring:
            for batch, samples in batches.fetch(mine, training.seed, training.applied):
                training.activity.now(Phase.EVALUATING, microbatch=batch)
                found = scoring.whole(lambda: _score(training, score, batches, batch, samples))  # noqa: B023
                # A module that is not in eval() may change its buffers; the change must not outlive the batch.
                buffers.restore()
                if found is None:
                    break
                own.append(found)
                reach("scored", training.applied)
        encoded = gather(training, "evaluate", msgspec.msgpack.encode(_Part(digest, own)))
        parts = [msgspec.msgpack.decode(part, type=_Part) for part in encoded]
        if len({part.samples for part in parts}) > 1:
            raise UnsafeScript(_DIFFERENT)
        for part in parts:
            scored |= {each.place: each for each in part.scored}
    # The script's next draws must not depend on which worker scored what.
    rng.seed_all(seed)
    return _mean([scored[place] for batch in range(len(batches)) for place in _places(batches, batch)])


def _places(batches: Batches, batch: int) -> list[tuple[int, int]]:
    """Return the parts of a batch."""
    return [(batch, part) for part in range(batches.split(batch).parts)]


def _missing(batches: Batches, scored: Mapping[tuple[int, int], _Scored]) -> list[int]:
    """Return the batches of which a part has no score."""
    numbers = range(len(batches))
    return [batch for batch in numbers if any(place not in scored for place in _places(batches, batch))]


def _share(training: TrainingLoop, batches: list[int]) -> list[int]:
    """Return this worker's part of ``batches``: none while it is catching up, all if it is the only worker left."""
    ledger = training.participant.ledger
    if ledger.layout.slots:
        able = able_replicas(ledger.layout, ledger.members, ledger.idle)
        return batches[able.index(ledger.replica) :: len(able)] if ledger.is_live and not training.behind else []
    if training.behind:
        return batches if training.calls.left_alone() else []
    ranks, position = taking_part(training.participant)
    return batches[position :: len(ranks)]


class Scoring:
    """The replica of this worker while it scores batches: a batch that breaks in it does not count."""

    def __init__(self, training: TrainingLoop) -> None:
        self._training = training
        self._stack = ExitStack()

    def __enter__(self) -> Scoring:
        link = self._training.link
        if link is not None:
            self._stack.enter_context(link.scoring(live=self._training.participant.ledger.is_live))
        return self

    def whole(self, score: Callable[[], _Scored]) -> _Scored | None:
        """Return what ``score()`` gave; None if a worker of the replica was lost meanwhile: others compute the batch."""
        link = self._training.link
        try:
            found = score()
        except Exception:
            # After a break it computed with numbers that stand in for those of another worker.
            if link is None or not link.spoiled:
                raise
            return None
        return None if link is not None and link.spoiled else found

    def __exit__(self, *error: object) -> None:
        link, state = self._training.link, self._training.state
        if link is None:
            return
        self._stack.close()
        if link.spoiled:
            # The gradient of the last step may still be needed.
            kept = [(param, param.grad) for param in state.params]
            fsdp_reset.reset(state.modules.values())
            for param, grad in kept:
                param.grad = grad
            link.cleaned()
        state.reshard()


@torch.no_grad()
def _score(training: TrainingLoop, score: Score, batches: Batches, batch: int, samples: Any) -> _Scored:
    split = batches.split(batch)
    rng.seed_all(rng.derive(training.seed, rng.EVALUATE, training.applied, batch, *split.lane))
    values = score(samples)
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"job.evaluate: the function returned a {type(values).__qualname__}: it returns a dict of numbers, the means"
            " over its batch"
        )
    size = batches.size(batch) // split.parts
    return _Scored(batch, size, {str(name): float(value) for name, value in values.items()}, split.part)


def _mean(scored: list[_Scored]) -> dict[str, float]:
    sums: dict[str, float] = {}
    sizes: dict[str, int] = {}
    for each in scored:
        for name, value in each.values.items():
            sums[name] = sums.get(name, 0.0) + value * each.size
            sizes[name] = sizes.get(name, 0) + each.size
    return {name: sums[name] / sizes[name] for name in sums}
