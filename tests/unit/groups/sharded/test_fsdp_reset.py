"""After an iteration that was broken off, FSDP2 trains on as if it had not begun."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from .broken import operations_of_a_step, train_after_break
from .conftest import Run

KEPT: dict[str, Any] = {"reshard_after_forward": False}


@pytest.fixture(scope="module")
def undisturbed(two: Run) -> list[Any]:
    return list(two(train_after_break, "", 0, False, {})[0])


def test_a_step_gathers_twice_and_reduces_once(two: Run) -> None:
    """The numbers below lean on it: the root keeps its parameters from forward to backward."""
    assert two(operations_of_a_step)[0] == ["all_gather"] * 3 + ["all_gather", "reduce_scatter"] * 2 + [
        "reduce_scatter"
    ]


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("how", ["echo", "raise"])
@pytest.mark.parametrize("after", [-1, 1, 3, 4, 5, 7])
def test_reset_makes_the_next_step_as_if_nothing_had_happened(
    two: Run, undisturbed: list[Any], how: str, after: int, by_hand: bool
) -> None:
    """P1: in the first forward, in a forward, between forward and backward, in a backward."""
    if after < 0 and by_hand and how == "raise":
        pytest.skip("as the others")
    for params in two(train_after_break, how, after, by_hand, {}):
        assert all(numpy.array_equal(mine, other) for mine, other in zip(params, undisturbed, strict=True))


@pytest.mark.parametrize("how", ["echo", "raise"])
def test_reset_shards_parameters_that_stay_whole_between_forward_and_backward(
    two: Run, undisturbed: list[Any], how: str
) -> None:
    for params in two(train_after_break, how, 4, False, KEPT):
        assert all(numpy.array_equal(mine, other) for mine, other in zip(params, undisturbed, strict=True))
