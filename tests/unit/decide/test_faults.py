from __future__ import annotations

import pytest

from craft.decide.faults import FaultCost, fault_cost, goodput


def cost(last_commit: float | None, resumed: float | None, step_s: float = 1.0) -> FaultCost:
    return fault_cost(generation=2, what="b lost", seen=10.5, last_commit=last_commit, resumed=resumed, step_s=step_s)


def test_a_fault_costs_the_time_between_commits_less_an_undisturbed_step() -> None:
    assert cost(last_commit=10.0, resumed=12.5).lost_s == pytest.approx(1.5)


def test_before_the_first_commit_the_time_counts_from_when_it_was_seen() -> None:
    assert cost(last_commit=None, resumed=13.5).lost_s == pytest.approx(2.0)


def test_a_fault_never_gains_time() -> None:
    assert cost(last_commit=10.0, resumed=10.2).lost_s == 0.0


def test_of_a_fault_after_which_nothing_was_committed_the_cost_is_unknown() -> None:
    assert cost(last_commit=10.0, resumed=None).lost_s is None


def test_goodput_is_the_share_of_time_that_was_not_lost() -> None:
    costs = [cost(last_commit=10.0, resumed=12.5), cost(last_commit=10.0, resumed=None)]

    assert goodput(15.0, costs) == pytest.approx(0.9)


def test_goodput_stays_between_nothing_and_all() -> None:
    assert goodput(0.0, []) == 1.0
    assert goodput(1.0, [cost(last_commit=10.0, resumed=20.0)]) == 0.0
