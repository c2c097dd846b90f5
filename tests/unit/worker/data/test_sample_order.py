"""The data order: every sample in exactly one microbatch of a pass, whatever the sizes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from craft.worker.data.sample_order import SampleOrder


def order(
    length: int, global_batch: int, microbatches: int, *, seed: int = 0, shuffle: bool = True, drop_last: bool = False
) -> SampleOrder:
    return SampleOrder(
        length=length,
        global_batch=global_batch,
        microbatches=microbatches,
        seed=seed,
        shuffle=shuffle,
        drop_last=drop_last,
    )


def samples_of(one: SampleOrder, step: int) -> list[int]:
    return [index for microbatch in range(one.size_of(step)) for index in one.samples_of(step, microbatch).indices]


def pass_of(one: SampleOrder, number: int) -> list[int]:
    steps = range(number * one.steps_per_pass, (number + 1) * one.steps_per_pass)
    return [index for step in steps for index in samples_of(one, step)]


sizes = st.tuples(st.integers(1, 60), st.integers(1, 20), st.integers(1, 9))


@given(sizes, st.booleans(), st.integers(0, 3))
def test_every_sample_is_in_exactly_one_microbatch_of_a_pass(
    case: tuple[int, int, int], shuffle: bool, number: int
) -> None:
    """P2, for any length, batch and number of microbatches, the last and partial batch included."""
    length, global_batch, microbatches = case
    one = order(length, global_batch, microbatches, shuffle=shuffle)

    assert sorted(pass_of(one, number)) == list(range(length))


@given(sizes, st.integers(0, 3))
def test_without_the_last_batch_no_sample_comes_twice_and_every_step_is_whole(
    case: tuple[int, int, int], number: int
) -> None:
    length, global_batch, microbatches = case
    one = order(length, global_batch, microbatches, drop_last=True)

    counts = Counter(pass_of(one, number))

    assert one.steps_per_pass == length // global_batch
    assert sum(counts.values()) == one.steps_per_pass * global_batch
    assert set(counts.values()) <= {1}


@given(sizes)
def test_microbatches_differ_by_at_most_one_sample_and_none_is_empty(case: tuple[int, int, int]) -> None:
    length, global_batch, microbatches = case
    one = order(length, global_batch, microbatches)

    for step in range(one.steps_per_pass):
        counts = [one.count(step, microbatch) for microbatch in range(one.size_of(step))]
        assert [len(one.samples_of(step, microbatch).indices) for microbatch in range(one.size_of(step))] == counts
        assert sum(counts) == one.batch_size(step)
        assert min(counts) >= 1
        assert max(counts) - min(counts) <= 1
        assert counts == sorted(counts, reverse=True)
        assert all(one.count(step, microbatch) == 0 for microbatch in range(one.size_of(step), microbatches))


@given(sizes)
def test_weights_are_in_proportion_to_the_samples(case: tuple[int, int, int]) -> None:
    length, global_batch, microbatches = case
    one = order(length, global_batch, microbatches)

    for step in range(one.steps_per_pass):
        largest = one.count(step, 0)
        for microbatch in range(one.size_of(step)):
            assert one.weight(step, microbatch) == one.count(step, microbatch) / largest


def test_microbatches_of_one_size_all_weigh_exactly_one() -> None:
    """So that nothing is multiplied, and no bit depends on it."""
    one = order(24, 12, 4)

    assert {one.weight(step, microbatch) for step in range(2) for microbatch in range(4)} == {1.0}


def test_more_microbatches_than_samples_leaves_the_last_ones_out() -> None:
    one = order(10, 4, 6)

    assert [one.size_of(step) for step in range(3)] == [4, 4, 2]
    assert one.batch_size(2) == 2


def test_without_a_shuffle_samples_come_in_their_own_order() -> None:
    assert pass_of(order(11, 4, 3, shuffle=False), 1) == list(range(11))


def test_every_pass_and_every_seed_has_an_order_of_its_own() -> None:
    one, other = order(50, 10, 2, seed=1), order(50, 10, 2, seed=2)

    orders = [tuple(pass_of(one, 0)), tuple(pass_of(one, 1)), tuple(pass_of(other, 0))]

    assert len(set(orders)) == 3


@given(st.integers(0, 40), st.integers(0, 40))
def test_a_place_is_the_same_whenever_and_by_whomever_it_is_asked_for(first: int, second: int) -> None:
    """P1: a worker that joins late, or redoes a step of an earlier pass, finds the same samples."""
    asked = order(22, 5, 3)
    asked.samples_of(first, 0)

    assert asked.samples_of(second, 1) == order(22, 5, 3).samples_of(second, 1)


def test_the_number_of_microbatches_cuts_the_same_batches() -> None:
    """A global batch is the same samples however it is cut."""
    assert [samples_of(order(30, 8, 1), step) for step in range(4)] == [
        samples_of(order(30, 8, 5), step) for step in range(4)
    ]


def test_a_step_knows_its_pass() -> None:
    one = order(22, 8, 2)

    assert one.steps_per_pass == 3
    assert [one.epoch_of(step) for step in range(7)] == [0, 0, 0, 1, 1, 1, 2]


def test_a_pass_that_is_to_end_earlier_has_the_first_samples_of_its_own_shuffle() -> None:
    whole = order(40, 8, 4)
    shorter = SampleOrder(
        length=40, global_batch=8, microbatches=4, seed=0, shuffle=True, drop_last=False, steps_per_pass=2
    )
    assert shorter.steps_per_pass == 2
    assert [pass_of(shorter, number) for number in range(3)] == [pass_of(whole, number)[:16] for number in range(3)]


def test_by_batches_the_last_step_of_a_pass_has_fewer_of_them() -> None:
    order = SampleOrder(
        length=100,
        global_batch=12,
        microbatches=3,
        seed=0,
        shuffle=False,
        drop_last=False,
        batch=4,
        samples_per_pass=22,
    )
    assert order.steps_per_pass == 2
    assert [[order.count(step, each) for each in range(order.size_of(step))] for step in range(3)] == [
        [4, 4, 4], [4, 4, 2], [4, 4, 4],
    ]  # fmt: skip
    assert order.samples_of(1, 2).indices == (20, 21) and order.samples_of(2, 0).indices == (0, 1, 2, 3)
    assert order.weight(1, 2) == 0.5
