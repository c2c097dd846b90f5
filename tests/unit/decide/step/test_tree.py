from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from craft.decide.step.plan import plan, share_of
from craft.decide.step.tree import Node, cover, fold, middle, parent_of

SIZES = range(1, 41)


def nodes_of(num_microbatches: int) -> set[Node]:
    """Every node, found from the root down."""
    found: set[Node] = set()
    todo = [(0, num_microbatches)]
    while todo:
        lo, hi = todo.pop()
        found.add((lo, hi))
        if hi - lo > 1:
            mid = middle(lo, hi)
            todo += [(lo, mid), (mid, hi)]
    return found


def leaves(nodes: tuple[Node, ...]) -> list[int]:
    return [microbatch for lo, hi in nodes for microbatch in range(lo, hi)]


def add(left: str, right: str) -> str:
    return f"({left}+{right})"


def expression(microbatches: list[int], num_microbatches: int) -> str | None:
    """The sum over single microbatches, as text: equal texts are equal bits."""
    return fold({(m, m + 1): str(m) for m in microbatches}, num_microbatches, add)


held_of_any_size = st.integers(1, 40).flatmap(
    lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1)).map(sorted))
)
owners_of_any_size = st.integers(1, 40).flatmap(lambda size: st.lists(st.integers(-1, 5), min_size=size, max_size=size))


@pytest.mark.parametrize("size", SIZES)
def test_a_node_has_one_leaf_or_two_children_that_share_it(size: int) -> None:
    nodes = nodes_of(size)

    assert len(nodes) == 2 * size - 1
    assert all((m, m + 1) in nodes for m in range(size))


@pytest.mark.parametrize("size", SIZES)
def test_every_node_but_the_root_has_a_parent_and_a_sibling(size: int) -> None:
    for lo, hi in nodes_of(size):
        above = parent_of((lo, hi), size)
        if (lo, hi) == (0, size):
            assert above is None
            continue
        assert above is not None
        (top_lo, top_hi), sibling = above
        assert {(lo, hi), sibling} == {(top_lo, middle(top_lo, top_hi)), (middle(top_lo, top_hi), top_hi)}


@given(held_of_any_size)
def test_a_cover_is_exactly_what_is_held_from_left_to_right(case: tuple[int, list[int]]) -> None:
    size, held = case

    covering = cover(held, size)

    assert leaves(covering) == held
    assert set(covering) <= nodes_of(size)


@given(held_of_any_size)
def test_a_cover_has_the_fewest_nodes(case: tuple[int, list[int]]) -> None:
    """Those nodes that are held as a whole and whose parent is not: any other exact choice splits one of them."""
    size, held = case
    inside = {node for node in nodes_of(size) if set(range(*node)) <= set(held)}

    largest = {node for node in inside if (above := parent_of(node, size)) is None or above[0] not in inside}

    assert set(cover(held, size)) == largest


def test_nothing_is_covered_by_nothing() -> None:
    assert cover((), 5) == ()
    assert cover((), 0) == ()


@given(owners_of_any_size)
def test_who_holds_what_does_not_change_the_order_in_which_it_is_added(owners: list[int]) -> None:
    """P1: the same sum, term by term, for any partition into covers; what is dropped (-1) is in none of them."""
    size = len(owners)
    parts: dict[Node, str] = {}
    for rank in set(owners) - {-1}:
        for lo, hi in cover(share_of(owners, rank), size):
            block = expression(list(range(lo, hi)), size)
            assert block is not None
            parts[lo, hi] = block

    present = [microbatch for microbatch, owner in enumerate(owners) if owner != -1]
    assert fold(parts, size, add) == expression(present, size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 8])
def test_planned_shares_add_up_like_single_microbatches(size: int, num_ranks: int) -> None:
    """P1: for any worker count."""
    parts = {}
    for rank in range(num_ranks):
        for lo, hi in cover(share_of(plan(size, num_ranks), rank), size):
            parts[lo, hi] = expression(list(range(lo, hi)), size)

    assert fold(parts, size, lambda left, right: add(str(left), str(right))) == expression(list(range(size)), size)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8, 16])
def test_equal_shares_of_a_power_of_two_are_whole_nodes(num_ranks: int) -> None:
    owners = plan(16, num_ranks)

    assert all(len(cover(share_of(owners, rank), 16)) == 1 for rank in range(num_ranks))


def test_nothing_at_all_adds_up_to_nothing() -> None:
    assert fold({}, 7, add) is None


def test_absent_branches_add_nothing() -> None:
    assert expression([0, 3], 4) == "(0+3)"
    assert expression([2], 4) == "2"
