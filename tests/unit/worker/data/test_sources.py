"""Microbatches from a dataset or from streams: what they hold depends on their place alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from craft.worker.data.sample_order import MicrobatchSamples, SampleOrder
from craft.worker.data.sources import ENDED, Fetcher, MapSource, Prefetch, StreamSource

STEPS = 6


class Augmented:
    """Draws from every generator that augmentations draw from, in whichever process it is called."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, torch.rand(1).item(), float(numpy.random.random()), random.random()


def order() -> SampleOrder:
    """A batch that 3 microbatches do not divide, and a partial one at the end of each pass."""
    return SampleOrder(length=22, global_batch=8, microbatches=3, seed=5, shuffle=True, drop_last=False)


def source(num_workers: int) -> MapSource:
    return MapSource(
        Augmented(),
        order(),
        seed=5,
        total_steps=STEPS,
        collate=list,
        num_workers=num_workers,
        loader_options={},
    )


def everything() -> dict[tuple[int, int], object]:
    alone = source(0)
    places = itertools.product(range(STEPS), range(3))
    return {key: alone.fetch(*key) for key in places if key[1] < alone.size_of(key[0])}


EVERYTHING = everything()


def test_a_microbatch_holds_the_samples_of_its_place() -> None:
    for (step, microbatch), data in EVERYTHING.items():
        assert isinstance(data, list)
        assert tuple(sample[0] for sample in data) == order().samples_of(step, microbatch).indices


@given(st.permutations(list(EVERYTHING)))
def test_what_is_fetched_does_not_depend_on_what_was_fetched_before(places: list[tuple[int, int]]) -> None:
    """P1: random numbers of data loading are set by the place."""
    random_access = source(0)

    for key in places[:4]:
        assert random_access.fetch(*key) == EVERYTHING[key]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_with_and_without_loader_processes_the_data_is_the_same(num_workers: int) -> None:
    """P1: also for what is fetched twice, given to us after a loss, or fetched ahead and then not ours any more."""
    one = source(num_workers)
    shares = [(0,), (0,), (0, 2), (1, 2), (), (1,)]
    for step, share in enumerate(shares):
        one.expect(step, share)
        for microbatch in share:
            if microbatch < one.size_of(step):
                assert one.fetch(step, microbatch) == EVERYTHING[step, microbatch]
        if step in (0, 3, 5):
            # A loss: another microbatch of this step becomes ours, and one is computed a second time.
            more = (*share, 0)
            one.expect(step, more)
            for _ in range(2):
                assert one.fetch(step, 0) == EVERYTHING[step, 0]
    one.close()


def test_a_dataset_that_gives_many_samples_at_once_is_asked_once() -> None:
    class Whole(Augmented):
        def __getitems__(self, indices: list[int]) -> list[str]:
            return [f"sample {index}" for index in indices]

    place = MicrobatchSamples(3, 1, (4, 7))

    assert Fetcher(Whole(), list, 0)[place] == ((3, 1), ["sample 4", "sample 7"])


def test_past_the_end_there_are_no_microbatches() -> None:
    one = source(0)

    assert [one.size_of(step) for step in (0, 2, STEPS - 1, STEPS)] == [3, 3, 3, 0]
    assert (one.more(STEPS - 1, 0), one.more(STEPS, 0)) == (True, False)
    assert one.epoch_of(3) == 1


def prefetch(total_steps: int = 3) -> Prefetch:
    return Prefetch(order(), total_steps)


def taken(one: Prefetch, count: int) -> list[tuple[int, int]]:
    """The next places that loader processes are given."""
    return [(place.step, place.microbatch) for place in itertools.islice(iter(one), count)]


def test_what_is_fetched_ahead_is_the_share_of_the_coming_steps() -> None:
    one = prefetch()
    one.expect(0, (1, 2))

    assert taken(one, 7) == [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2), (-1, -1)]


def test_what_is_urgent_goes_first() -> None:
    one = prefetch()
    one.expect(0, (1,))
    assert taken(one, 1) == [(0, 1)]

    one.add_urgent(0, 0)

    assert taken(one, 2) == [(0, 0), (1, 1)]


def test_nothing_is_fetched_again_when_the_share_changes() -> None:
    one = prefetch()
    one.expect(0, (0,))
    assert taken(one, 2) == [(0, 0), (1, 0)]
    one.mark_used(0, 0)

    one.expect(0, (0, 1))

    assert taken(one, 4) == [(0, 1), (1, 1), (2, 0), (2, 1)]


def test_a_worker_without_a_share_fetches_nothing() -> None:
    one = prefetch()
    one.expect(0, ())

    assert taken(one, 2) == [(-1, -1), (-1, -1)]


class Streams:
    """Streams of numbered items, which remember how they were opened."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths
        self.opened: list[tuple[int, int, int]] = []
        self.drawn: list[tuple[int, int]] = []

    def __call__(self, microbatch: int, num_microbatches: int, start_step: int) -> Iterator[tuple[int, int, float]]:
        self.opened.append((microbatch, num_microbatches, start_step))
        return self._items(microbatch, start_step)

    def _items(self, microbatch: int, start_step: int) -> Iterator[tuple[int, int, float]]:
        for step in range(start_step, self.lengths[microbatch]):
            self.drawn.append((step, microbatch))
            yield step, microbatch, torch.rand(1).item()


def stream_source(streams: Streams, total_steps: int | None = None) -> StreamSource:
    return StreamSource(streams, microbatches=len(streams.lengths), seed=0, total_steps=total_steps)


def follow(one: StreamSource, first_step: int, microbatch: int) -> list[object]:
    """What a worker does with a stream from a step on, until it ends."""
    items: list[object] = []
    for step in itertools.count(first_step):
        one.expect(step, (microbatch,))
        item = one.fetch(step, microbatch)
        if item is ENDED:
            return items
        items.append(item)
        assert one.more(step + 1, microbatch) == (step + 1 < 4)
    return items


def test_a_stream_is_opened_once_and_gives_every_item_once_in_spite_of_looking_ahead() -> None:
    """P2."""
    streams = Streams(4, 4)

    items = follow(stream_source(streams), 0, 1)

    assert [item[:2] for item in items if isinstance(item, tuple)] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert streams.opened == [(1, 2, 0)]
    assert streams.drawn == [(0, 1), (1, 1), (2, 1), (3, 1)]


def test_whoever_takes_a_stream_over_opens_it_at_the_step_and_gets_the_same_items() -> None:
    """P1 and P2: its random numbers are those of the place, too."""
    whole = follow(stream_source(Streams(4, 4)), 0, 1)
    streams = Streams(4, 4)
    one = stream_source(streams)
    one.fetch(0, 0)

    assert follow(one, 2, 1) == whole[2:]
    assert streams.opened == [(0, 2, 0), (1, 2, 2)]


def test_an_item_that_is_asked_for_again_is_read_again() -> None:
    """The script may have changed it in place, as when it was computed once before to compare bits."""

    def stream(microbatch: int, num_microbatches: int, start_step: int) -> Iterator[torch.Tensor]:
        for step in range(start_step, 5):
            yield torch.full((2,), float(step))

    one = StreamSource(stream, microbatches=1, seed=0, total_steps=None)
    one.fetch(0, 0).add_(100)

    assert one.fetch(0, 0).tolist() == [0.0, 0.0]
    assert one.more(1, 0)
    assert one.fetch(1, 0).tolist() == [1.0, 1.0]


def test_with_a_number_of_steps_nothing_is_drawn_past_the_last() -> None:
    streams = Streams(10)
    one = stream_source(streams, total_steps=2)

    for step in range(2):
        one.fetch(step, 0)
        assert one.more(step + 1, 0) == (step == 0)

    assert streams.drawn == [(0, 0), (1, 0)]
    assert [one.size_of(step) for step in range(3)] == [1, 1, 0]


def test_a_stream_without_items_has_ended_from_the_beginning_and_stays_so() -> None:
    one = stream_source(Streams(0, 3))

    assert one.fetch(0, 0) is ENDED
    assert not one.more(1, 0)
    assert one.fetch(1, 0) is ENDED


def test_a_stream_may_be_any_iterable() -> None:
    one = StreamSource(lambda *_: [7, 8], microbatches=1, seed=0, total_steps=None)  # type: ignore[arg-type]

    assert [one.fetch(step, 0) for step in range(2)] == [7, 8]
    assert one.fetch(2, 0) is ENDED
