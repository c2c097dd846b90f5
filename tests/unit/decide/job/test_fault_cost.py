from __future__ import annotations

from typing import Any

import pytest

from craft.decide.job.fault_cost import FaultCost, fault_cost, goodput, recovered, set_back
from craft.protocol.events import Recovered
from craft.protocol.generation_log import Entered


def cost(last_commit: float | None, resumed: float | None, step_s: float = 1.0) -> FaultCost:
    return fault_cost(generation=2, what="b lost", seen=10.5, last_commit=last_commit, resumed=resumed, step_s=step_s)


def test_a_fault_costs_the_time_between_commits_less_an_undisturbed_step() -> None:
    assert cost(last_commit=10.0, resumed=12.5).lost_s == pytest.approx(1.5)


def test_a_fault_before_the_first_commit_takes_no_time_from_training() -> None:
    assert cost(last_commit=None, resumed=13.5).lost_s is None


def test_a_fault_never_gains_time() -> None:
    assert cost(last_commit=10.0, resumed=10.2).lost_s == 0.0


def test_of_a_fault_after_which_nothing_was_committed_the_cost_is_unknown() -> None:
    assert cost(last_commit=10.0, resumed=None).lost_s is None


def test_goodput_is_the_share_of_time_that_was_not_lost() -> None:
    costs = [cost(last_commit=10.0, resumed=12.5), cost(last_commit=10.0, resumed=None)]

    assert goodput(15.0, costs, steps=5) == pytest.approx(0.9)


def test_goodput_stays_between_nothing_and_all() -> None:
    assert goodput(1.0, [], steps=1) == 1.0
    assert goodput(1.0, [cost(last_commit=10.0, resumed=20.0)], steps=1) == 0.0


def test_a_job_that_committed_no_step_has_no_goodput() -> None:
    assert goodput(15.0, [], steps=0) is None
    assert goodput(0.0, [], steps=1) is None
    assert goodput(-3.0, [], steps=1) is None


def entered(generation: int, *members: str, **more: Any) -> Entered:
    given = {
        "time": 1.0, "told": 1.0, "aborted": 1.0, "met": 1.0, "entered": 1.0, "agreed": False, "lost": (), "joiners": (),
        "idle": (), "step": 11, "commits": False, "retried": True, "given": (), "mine": (), "dropped": (),
    }  # fmt: skip
    return Entered(generation=generation, members=members, **{**given, **more})


def told(*entries: Entered, since: int = 1, samples: int | None = 4) -> Recovered:
    setback = None
    for entry in entries:
        setback = set_back(setback, since, entry)
    assert setback is not None
    return recovered(
        setback,
        worker_id="w0",
        generation=entries[-1].generation,
        step=11,
        lost_s=0.5,
        samples=lambda *_: samples,
        now=9.0,
    )


def test_what_is_given_out_anew_is_what_a_loss_costs_in_work() -> None:
    found = told(entered(2, "w0", "w2", lost=("w1",), given=(2, 3)))

    assert (found.since, found.generation, found.lost) == (1, 2, ("w1",))
    assert (found.retried, found.redone, found.redone_samples) == ((11,), (2, 3), 8)
    assert (found.dropped, found.dropped_samples) == ((), 0)


def test_a_second_loss_before_the_commit_adds_to_the_first_and_counts_no_microbatch_twice() -> None:
    first = entered(2, "w0", "w2", "w3", lost=("w1",), given=(2, 3))
    second = entered(3, "w0", "w3", lost=("w2",), given=(3, 4, 5))

    found = told(first, second)

    assert (found.since, found.generation, found.lost) == (1, 3, ("w1", "w2"))
    assert (found.retried, found.redone, found.redone_samples) == ((11,), (2, 3, 4, 5), 16)


def test_a_result_in_hand_costs_no_work() -> None:
    found = told(entered(2, "w0", "w2", lost=("w1",), commits=True, retried=False, step=12))

    assert (found.retried, found.redone, found.redone_samples) == ((), (), 0)


def test_under_shrink_what_is_dropped_is_not_computed_again() -> None:
    first = entered(2, "w0", "w2", lost=("w1",), given=(2,))
    found = told(first, entered(3, "w0", lost=("w2",), dropped=(2, 3)))

    assert (found.redone, found.dropped, found.dropped_samples) == ((), (2, 3), 8)


def test_how_many_samples_a_stream_gave_only_the_script_knows() -> None:
    assert told(entered(2, "w0", lost=("w1",), given=(2,)), samples=None).redone_samples is None


def test_who_joins_or_catches_up_leaves_the_telling_to_those_who_were_there() -> None:
    spare_first = entered(2, "w3", "w4", "w2", joiners=("w3",), idle=("w3", "w4"))

    assert set_back(None, 1, spare_first).teller == "w2"
    assert set_back(None, 1, entered(2, "w3", "w4", joiners=("w3",), idle=("w3", "w4"))).teller == "w4"
