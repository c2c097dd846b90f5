"""IterableDatasets: the order of samples, the ends of passes, and workers that begin in the middle."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from craft.protocol.errors import ConfigError
from craft.worker.api.validation import check_registered
from craft.worker.data.source_args import make_source
from craft.worker.data.sources import ENDED

from ..alone import alone, model


class Plain(IterableDataset[float]):
    """Has no state: whoever comes later reads the pass from its beginning. Its samples are random, and differ by pass."""

    def __init__(self, length: int = 10) -> None:
        self.length = length
        self.epoch = 0
        self.read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[float]:
        for number in range(self.length):
            self.read += 1
            yield 1000.0 * self.epoch + number + random.random() / 2 + float(torch.rand(())) / 4


class Stateful(Plain):
    """Says where it is, and goes on there."""

    def __init__(self, length: int = 10) -> None:
        super().__init__(length)
        self.next = 0
        self.offset = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "offset": self.offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next, self.offset = state["next"], state["offset"].clone()

    def __iter__(self) -> Iterator[float]:
        while self.next < self.length:
            self.read += 1
            self.next += 1
            self.offset += 0.001
            yield 1000.0 * self.epoch + self.next - 1 + random.random() / 2 + float(self.offset[0])
        self.next, self.offset = 0, torch.zeros(2)


class Walk:
    """An iterator with state."""

    def __init__(self, data: StatefulIterator) -> None:
        self.data = data
        self.at = 0

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> float:
        if self.at >= self.data.length:
            raise StopIteration
        self.at += 1
        self.data.read += 1
        return float(self.at - 1) + 1000 * self.data.epoch

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class StatefulIterator(Plain):
    def __iter__(self) -> Iterator[float]:
        return Walk(self)


KINDS: dict[str, Callable[[int], Plain]] = {"plain": Plain, "stateful": Stateful, "stateful iterator": StatefulIterator}


def make(data: Any, **changes: Any) -> Any:
    settled = {"shuffle": None, "num_workers": None, "seed": 3, "epochs": None, "steps": None, "global_batch": None}
    return make_source(data, **{**settled, "microbatches": 3, "collate_fn": tuple, **changes})[0]


def step_of(source: Any, step: int) -> list[Any]:
    source.expect(step, (0, 1, 2))
    return [source.fetch(step, each) for each in range(source.size_of(step))]


def test_the_first_global_batch_is_step_0_cut_like_that_of_a_dataset() -> None:
    class Numbers(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(9))

    source = make(Numbers(), global_batch=5, epochs=2)
    assert step_of(source, 0) == [(0, 1), (2, 3), (4,)]
    assert [source.weight(0, each) for each in range(3)] == [1.0, 1.0, 0.5]
    assert source.more(1, 0) and step_of(source, 1) == [(5, 6), (7,), (8,)]
    assert [source.weight(1, each) for each in range(3)] == [1.0, 0.5, 0.5]
    assert step_of(source, 2) == [(0, 1), (2, 3), (4,)]
    assert source.more(3, 0)
    source.expect(3, ())
    assert not source.more(4, 0) and source.fetch(4, 0) is ENDED
    assert [source.epoch_of(step) for step in (2, 3, 4)] == [1, 1, 2]
    assert source.ends_epoch(3) == 1 and source.ends_epoch(2) is None
    dropped = make(DataLoader(Numbers(), batch_size=5, drop_last=True), steps=4)
    assert [step_of(dropped, step) for step in range(3)] == [[(0, 1), (2, 3), (4,)]] * 3
    assert dropped.ends_epoch(0) == 0 and not dropped.more(4, 0)


def test_fewer_samples_than_microbatches_leave_some_empty() -> None:
    source = make(Plain(5), global_batch=3, epochs=1)
    step_of(source, 0)
    last = step_of(source, 1)
    assert len(last[0]) == len(last[1]) == 1 and last[2] is ENDED
    assert not source.more(2, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [10, 12])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_worker_that_comes_later_gets_the_same_samples(kind: str, length: int, num_workers: int) -> None:
    random.seed(1)
    expected = [step_of(make(KINDS[kind](length), global_batch=4, steps=9), step) for step in range(9)]
    veteran = make(KINDS[kind](length), global_batch=4, steps=9, num_workers=num_workers)
    try:
        for begins in range(1, 9):
            random.seed(begins)
            assert step_of(veteran, begins - 1) == expected[begins - 1]
            assert veteran.more(begins, 0)
            data = KINDS[kind](length)
            joiner = make(data, global_batch=4, steps=9)
            position = veteran.position(begins)
            joiner.seek(position)
            assert [step_of(joiner, step) for step in range(begins, 9)] == expected[begins:]
            # A worker that computes nothing knows the same place, without having read ahead.
            idle = make(KINDS[kind](length), global_batch=4, steps=9)
            assert idle.position(begins) == position
    finally:
        veteran.close()


def test_a_dataset_with_state_is_not_read_again() -> None:
    veteran = make(Stateful(100), global_batch=4, epochs=1)
    for step in range(20):
        step_of(veteran, step)
    data, without = Stateful(100), Plain(100)
    joiner, other = make(data, global_batch=4, epochs=1), make(without, global_batch=4, epochs=1)
    joiner.seek(veteran.position(20))
    assert step_of(joiner, 20) == step_of(veteran, 20)
    step_of(other, 20)
    assert (data.read, without.read) == (8, 84)


def test_a_stateful_loader_says_how_often_its_state_is_taken() -> None:
    loader = StatefulDataLoader(Stateful(100), batch_size=4, snapshot_every_n_steps=6)
    veteran = make(loader, epochs=1)
    for step in range(20):
        step_of(veteran, step)
    assert veteran.position(20).step == 18
    loader.load_state_dict(StatefulDataLoader(Stateful(100), batch_size=4).state_dict())
    with pytest.raises(ConfigError, match="CRAFT keeps the place in the data itself"):
        make(loader, epochs=1)


def test_a_stateful_loader_of_a_dataset_with_numbers_is_taken_over_like_any_other() -> None:
    loader = StatefulDataLoader(list(range(8)), batch_size=4, shuffle=False)
    assert step_of(make(loader, epochs=1), 1) == [(4, 5), (6,), (7,)]


def test_with_batch_size_none_each_item_is_a_microbatch() -> None:
    class Batches(IterableDataset[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[1, 2], [3], [4, 5], [6]])

    source = make(DataLoader(Batches(), batch_size=None), collate_fn=None)
    assert step_of(source, 0) == [[1, 2], [3], [4, 5]]
    assert step_of(source, 1) == [[6], ENDED, ENDED]
    assert source.weight(0, 1) == 1.0


def test_a_dataset_that_shares_by_loader_processes_is_read_whole() -> None:
    class Shares(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            info = get_worker_info()
            return iter(range(12) if info is None else range(info.id, 12, info.num_workers))

    source = make(Shares(), global_batch=6, num_workers=3)
    try:
        assert step_of(source, 0) == [(0, 1), (2, 3), (4, 5)]
    finally:
        source.close()


def test_what_a_script_changes_is_read_again_as_it_was() -> None:
    source = make(Plain(12), global_batch=6, num_workers=1, collate_fn=torch.tensor)
    try:
        first = source.fetch(0, 0)
        kept = first.clone()
        first.zero_()
        assert torch.equal(source.fetch(0, 0), kept)
    finally:
        source.close()


def test_a_pass_without_samples_is_refused() -> None:
    class Once(IterableDataset[int]):
        def __init__(self) -> None:
            self.items = iter(range(6))

        def __iter__(self) -> Iterator[int]:
            return self.items

    source = make(Once(), global_batch=6, steps=2)
    assert step_of(source, 0)
    with pytest.raises(ConfigError, match="its __iter__ must begin anew each time"):
        step_of(source, 1)
    with pytest.raises(ConfigError, match="there is nothing to train on"):
        step_of(make(Plain(0), global_batch=6, steps=2), 0)


def test_a_state_that_does_not_lead_back_is_refused() -> None:
    class Forgets(Stateful):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.next = self.length

    veteran = make(Forgets(100), global_batch=4)
    for step in range(6):
        step_of(veteran, step)
    joiner = make(Forgets(100), global_batch=4)
    joiner.seek(veteran.position(6))
    with pytest.raises(ConfigError, match="gave no sample after load_state_dict, in pass 0 at step 5"):
        step_of(joiner, 6)


def test_a_loader_is_not_registered() -> None:
    with pytest.raises(ConfigError, match="its place in the data follows the job without that"):
        check_registered("loader", StatefulDataLoader([1, 2]), {})


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_over_epochs_has_the_passes_of_the_dataset(kind: str) -> None:
    # No microbatch is computed a second time for comparison.
    job = alone(check_bits=False)
    net = job.replicate(model())
    found: list[list[int]] = []
    for epoch in job.epochs(3, KINDS[kind](10), global_batch=4, microbatches=2, collate_fn=tuple):
        found.append([])
        for step in epoch:
            samples = [int(sample) for batch in step for sample in batch]
            found[-1].append(len(samples))
            assert {sample // 1000 for sample in samples} == {len(found) - 1}
            assert step.last_of_epoch == (len(found[-1]) == 3)
    assert found == [[4, 4, 2]] * 3
    assert net is not None
