"""Orders that samplers draw: each pass is a new draw, the same whichever worker makes it and from wherever it begins."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from craft.protocol.errors import ConfigError
from craft.worker.data.source_args import make_source
from craft.worker.data.sources import ENDED

DATASET = list(range(20))


class ByEpoch(Sampler[int]):
    """Its draw is set by ``set_epoch``, as that of a DistributedSampler is."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(20, generator=torch.Generator().manual_seed(self.epoch)).tolist()[:10])


class OwnState(Sampler[int]):
    """Draws from a generator of its own, which goes on from pass to pass."""

    def __init__(self) -> None:
        self.own = random.Random(7)

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter(self.own.sample(DATASET, 8))


class Endless(Sampler[int]):
    """Has no length."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(DATASET, random.randint(5, 9)))


class Buckets(Sampler[list[int]]):
    """Batches of samples of one length; how many of which size differs from pass to pass."""

    def __init__(self) -> None:
        self.inner = RandomSampler(DATASET)

    def __iter__(self) -> Iterator[list[int]]:
        buckets: dict[int, list[int]] = {}
        for index in self.inner:
            buckets.setdefault(index % 3, []).append(index)
        for bucket in buckets.values():
            size = random.randint(2, 5)
            yield from (bucket[begin : begin + size] for begin in range(0, len(bucket), size))


LOADERS: dict[str, Callable[[], DataLoader[int]]] = {
    "subset": lambda: loader(sampler=SubsetRandomSampler([1, 2, 3, 5, 8, 13, 19])),
    "weighted": lambda: loader(sampler=WeightedRandomSampler([1.0 + each for each in DATASET], 12)),
    "own generator": lambda: loader(sampler=RandomSampler(DATASET, generator=torch.Generator().manual_seed(5), num_samples=9)),
    "with replacement": lambda: loader(sampler=RandomSampler(DATASET, replacement=True)),
    "by epoch": lambda: loader(sampler=ByEpoch()),
    "own state": lambda: loader(sampler=OwnState()),
    "no length": lambda: loader(sampler=Endless()),
    "batches": lambda: DataLoader(DATASET, batch_sampler=Buckets(), collate_fn=tuple),  # type: ignore[arg-type]
}  # fmt: skip


def loader(**more: Any) -> DataLoader[int]:
    return DataLoader(DATASET, batch_size=4, collate_fn=tuple, **more)  # type: ignore[arg-type]


def make(data: Any, **changes: Any) -> Any:
    settled = {
        "global_batch": None,
        "shuffle": None,
        "collate_fn": None,
        "num_workers": None,
        "seed": 3,
        "epochs": None,
    }
    return make_source(data, **{**settled, "microbatches": 3, "steps": None, **changes})[0]


def step_of(source: Any, step: int) -> list[tuple[int, ...]]:
    source.expect(step, (0, 1, 2))
    return [source.fetch(step, each) for each in range(source.size_of(step))]


def drawn(source: Any, steps: range) -> list[list[tuple[int, ...]]]:
    return [step_of(source, step) for step in steps]


@pytest.mark.parametrize("kind", LOADERS)
def test_a_worker_that_comes_later_gets_the_same_samples(kind: str) -> None:
    random.seed(1)
    source = make(LOADERS[kind](), steps=30)
    expected = drawn(source, range(30))
    random.seed(2)
    torch.manual_seed(2)
    for begins in (2, 11, 29):
        joiner = make(LOADERS[kind](), steps=30)
        veteran = make(LOADERS[kind](), steps=30)
        drawn(veteran, range(begins))
        if (position := veteran.position(begins)) is not None:
            joiner.seek(position)
        assert drawn(joiner, range(begins, 30)) == expected[begins:]


@pytest.mark.parametrize("kind", LOADERS)
def test_every_pass_is_a_new_draw_and_the_generators_of_the_script_are_left_alone(kind: str) -> None:
    source = make(LOADERS[kind](), steps=30)
    before = (torch.get_rng_state(), random.getstate())
    passes: dict[int, list[Any]] = {}
    for step in range(20):
        passes.setdefault(source.epoch_of(step), []).append(
            [source._order.samples_of(step, each).indices for each in range(3)]
        )
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert len(passes) > 2 and passes[0] != passes[1]


def test_weighted_samples_come_by_their_weights() -> None:
    weights = [0.0] * 10 + [1.0] * 10
    source = make(loader(sampler=WeightedRandomSampler(weights, 20)), epochs=10)
    found = Counter(index for step in drawn(source, range(50)) for part in step for index in part)
    assert set(found) == set(range(10, 20))


def test_a_batch_of_a_batch_sampler_is_a_global_batch_weighed_by_its_samples() -> None:
    batches = [[0, 1, 2, 3, 4], [5, 6], [7]]
    source = make(DataLoader(DATASET, batch_sampler=batches, collate_fn=tuple), epochs=2)  # type: ignore[arg-type]
    assert step_of(source, 0) == [(0, 1), (2, 3), (4,)]
    assert [source.weight(0, each) for each in range(3)] == [1.0, 1.0, 0.5]
    assert step_of(source, 1) == [(5,), (6,), ENDED]
    assert source.more(5, 0) and not source.more(6, 0)
    assert [source.ends_epoch(step) for step in range(6)] == [None, None, 0, None, None, 1]
    assert [source.epoch_of(step) for step in range(6)] == [0, 0, 0, 1, 1, 1]


def test_a_sampler_of_a_batch_sampler_of_torch_is_cut_anew() -> None:
    batches = BatchSampler(SubsetRandomSampler(range(0, 20, 2)), 5, drop_last=True)
    source = make(DataLoader(DATASET, batch_sampler=batches, collate_fn=tuple), epochs=1)  # type: ignore[arg-type]
    assert sorted(sum((sum(step, ()) for step in drawn(source, range(2))), ())) == list(range(0, 20, 2))
    assert source.size_of(2) == 0


def test_with_loader_processes_batches_of_a_batch_sampler_are_the_same() -> None:
    here, there = (make(LOADERS["batches"](), epochs=2, num_workers=each) for each in (0, 1))
    try:
        assert drawn(there, range(8)) == drawn(here, range(8))
    finally:
        there.close()


def test_a_length_that_is_not_true_is_refused() -> None:
    class Liar(SequentialSampler):
        def __len__(self) -> int:
            return 21

    source = make(loader(sampler=Liar(DATASET)), steps=3)
    with pytest.raises(ConfigError, match="has a length of 21 and drew 20 samples in pass 0"):
        step_of(source, 0)


def test_a_batch_sampler_without_batches_is_refused() -> None:
    source = make(DataLoader(DATASET, batch_sampler=[], collate_fn=tuple), steps=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="gave no batch in pass 0"):
        step_of(source, 0)
