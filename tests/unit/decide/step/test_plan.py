from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from craft.decide.step.plan import cost_of_loss, give_out, plan, share_of


@given(st.integers(0, 100), st.integers(1, 40))
def test_shares_are_contiguous_balanced_and_hold_every_microbatch_once(size: int, num_ranks: int) -> None:
    """P2: every microbatch has exactly one owner."""
    owners = plan(size, num_ranks)
    counts = [owners.count(rank) for rank in range(num_ranks)]

    assert len(owners) == size == sum(counts)
    assert all(left <= right for left, right in pairwise(owners))
    assert max(counts) - min(counts) <= 1


@given(st.integers(0, 100), st.integers(1, 40))
def test_larger_shares_come_first(size: int, num_ranks: int) -> None:
    counts = [plan(size, num_ranks).count(rank) for rank in range(num_ranks)]

    assert counts == sorted(counts, reverse=True)


def test_six_over_four_ranks() -> None:
    assert plan(6, 4) == (0, 0, 1, 1, 2, 3)


@given(st.lists(st.integers(-1, 5), max_size=30))
def test_shares_are_disjoint_and_in_order(owners: list[int]) -> None:
    shares = [share_of(owners, rank) for rank in range(6)]

    assert all(list(share) == sorted(share) for share in shares)
    assert sorted(m for share in shares for m in share) == [m for m, owner in enumerate(owners) if owner != -1]


@st.composite
def given_out_cases(draw: st.DrawFn) -> tuple[list[int | None], list[int], frozenset[int]]:
    num_ranks = draw(st.integers(1, 6))
    owners = draw(st.lists(st.none() | st.integers(0, num_ranks - 1), max_size=20))
    loads = draw(st.lists(st.integers(0, 5), min_size=num_ranks, max_size=num_ranks))
    idle = draw(st.sets(st.integers(0, num_ranks - 1), max_size=num_ranks - 1))
    return owners, loads, frozenset(idle)


@given(given_out_cases())
def test_only_what_has_no_owner_is_given_out_and_never_to_an_idle_rank(
    case: tuple[list[int | None], list[int], frozenset[int]],
) -> None:
    """P2: nothing changes hands."""
    owners, loads, idle = case

    answer = give_out(owners, loads, idle=idle)

    assert len(answer) == len(owners)
    for before, after in zip(owners, answer, strict=True):
        assert after == before if before is not None else after not in idle


@given(given_out_cases())
def test_it_goes_to_whoever_has_the_least_left_to_compute(
    case: tuple[list[int | None], list[int], frozenset[int]],
) -> None:
    owners, loads, idle = case
    todo = list(loads)

    for before, after in zip(owners, give_out(owners, loads, idle=idle), strict=True):
        if before is None:
            assert todo[after] == min(load for rank, load in enumerate(todo) if rank not in idle)
            todo[after] += 1


@pytest.mark.parametrize(
    ("size", "num_workers", "cost"), [(16, 4, 1.5), (12, 4, 4 / 3), (4, 4, 2.0), (2, 4, 1.0), (8, 1, 1.0)]
)
def test_the_cost_of_a_loss_is_how_much_longer_the_largest_share_takes(
    size: int, num_workers: int, cost: float
) -> None:
    assert cost_of_loss(size, num_workers) == pytest.approx(cost)


slow_ranks = st.lists(st.sampled_from([1.0, 1.0, 1.5, 3.0, 8.0]), min_size=1, max_size=12).map(tuple)


@given(st.integers(0, 100), slow_ranks)
def test_an_uneven_plan_holds_every_microbatch_once_and_leaves_nobody_without(
    size: int, slowness: tuple[float, ...]
) -> None:
    """P2: every microbatch has exactly one owner."""
    owners, even = plan(size, len(slowness), slowness), plan(size, len(slowness))

    assert len(owners) == size
    assert set(owners) == set(even)


@given(st.integers(1, 60), slow_ranks)
def test_no_other_sizes_of_shares_would_be_done_earlier(size: int, slowness: tuple[float, ...]) -> None:
    owners, even = plan(size, len(slowness), slowness), plan(size, len(slowness))
    done = max(owners.count(rank) * each for rank, each in enumerate(slowness))
    # Within any shorter time fewer microbatches can be computed than there are; each rank computes one in any case.
    within = [int((done - 1e-9) // each) for each in slowness]
    least = [min(1, even.count(rank)) for rank in range(len(slowness))]

    assert sum(map(max, within, least)) < size or any(each * least[rank] >= done for rank, each in enumerate(slowness))


@given(st.integers(1, 60), st.integers(1, 12), st.data())
def test_only_what_a_slow_rank_gives_up_changes_hands(size: int, num_ranks: int, data: st.DataObject) -> None:
    slow = data.draw(st.integers(0, num_ranks - 1))
    slowness = tuple(3.0 if rank == slow else 1.0 for rank in range(num_ranks))

    for before, after in zip(plan(size, num_ranks), plan(size, num_ranks, slowness), strict=True):
        assert after == before or before == slow


def test_what_moves_stays_together_on_whole_nodes() -> None:
    """32 over 4 ranks, the last one four times as slow: it keeps 24 and 25, and the others get two neighbours each."""
    assert plan(16, 4, (1.0, 1.0, 1.0, 3.0))[12:] == (3, 0, 1, 2)
    assert plan(32, 4, (1.0, 1.0, 1.0, 4.0))[24:] == (3, 3, 0, 0, 1, 1, 2, 2)
