"""Who hangs, and who holds up the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from craft.decide.detect.hangs import (
    FIRST_STEPS,
    NEVER_OVERDUE,
    HangLimits,
    held_up,
    limit_for,
    overdue,
    stopped,
)
from craft.protocol.values.activity import Doing, Phase

LIMITS = HangLimits()
JUDGED = [phase for phase in Phase if phase not in NEVER_OVERDUE]
SECONDS = st.floats(0, 1e6, allow_nan=False)


def doing(phase: Phase, *, usual_s: float | None = 0.1, since: float = 100.0, commits: int = 50) -> Doing:
    return Doing(
        phase=phase, since=since, step=41, microbatch=3, commits=commits, changes=400, longest=(usual_s,) * len(Phase)
    )


COMPUTING = doing(Phase.COMPUTING)
EXCHANGING = doing(Phase.EXCHANGING)


def test_a_fast_phase_has_the_floor_as_its_limit() -> None:
    assert limit_for(COMPUTING, LIMITS) == 10.0
    assert overdue(COMPUTING, 110.0, LIMITS) is None

    found = overdue(COMPUTING, 112.3, LIMITS)

    assert found is not None
    assert found.words == "computing microbatch 3 of step 41 for 12.3 s (limit 10 s)"
    assert (found.cause, found.phase) == ("slow", "computing")


def test_code_between_the_steps_has_longer_and_is_told_how_to_say_that_it_takes_long() -> None:
    """A validation of 14 s on the leader, where the update usually takes no time."""
    updating = doing(Phase.UPDATING, usual_s=0.001)
    assert overdue(updating, 114.0, LIMITS) is None

    found = overdue(updating, 221.0, LIMITS)

    assert found is not None and found.limit_s == 120.0
    assert "in the script's code after the exchange of step 41 for 121.0 s (limit 120 s)" in found.words
    assert "`with job.paused(...)`, or let job.once(...) do it" in found.words


def test_the_limit_grows_with_what_is_usual_on_this_worker() -> None:
    assert limit_for(doing(Phase.LOADING, usual_s=4.0), LIMITS) == 80.0


def test_one_step_that_compiled_for_minutes_does_not_make_the_limit_an_hour() -> None:
    assert limit_for(doing(Phase.COMPUTING, usual_s=180.0), LIMITS) == 600.0


def test_a_phase_that_really_takes_long_has_twice_that() -> None:
    assert limit_for(doing(Phase.EVALUATING, usual_s=1000.0), LIMITS) == 2000.0


@pytest.mark.parametrize("commits", range(FIRST_STEPS))
def test_the_first_steps_have_a_limit_of_their_own(commits: int) -> None:
    assert limit_for(doing(Phase.COMPUTING, commits=commits), LIMITS) == 600.0


def test_a_phase_never_completed_before_counts_as_first() -> None:
    assert limit_for(doing(Phase.EVALUATING, usual_s=None), LIMITS) == 600.0


@pytest.mark.parametrize("phase", sorted(NEVER_OVERDUE))
def test_waiting_pausing_starting_and_ending_are_never_overdue(phase: Phase) -> None:
    assert limit_for(doing(phase), LIMITS) is None
    assert overdue(doing(phase), 1e9, LIMITS) is None


def test_a_pause_names_its_reason() -> None:
    assert replace(doing(Phase.PAUSED), reason="evaluation").words == "paused (evaluation)"


def test_a_member_whose_gil_is_kept_in_the_exchange_is_overdue() -> None:
    """Its main thread seems to wait like everybody else's."""
    kept = replace(EXCHANGING, beat=101.0)

    found = overdue(kept, 113.0, LIMITS)

    assert found is not None
    assert found.words == (
        "in the exchange of step 41, but one of its threads has kept the GIL for 12.0 s (limit 10 s)"
    )
    assert found.phase == "gil"


def test_a_gil_kept_for_some_seconds_is_no_hang() -> None:
    assert overdue(replace(EXCHANGING, beat=101.0), 108.0, LIMITS) is None
    assert overdue(replace(COMPUTING, beat=100.0), 108.0, LIMITS) is None


def test_a_stopped_process_is_overdue_at_once_whatever_it_does() -> None:
    found = stopped("T", 100.0, 100.6, doing(Phase.PAUSED), LIMITS)

    assert found is not None
    assert found.words == "stopped by a signal for 0.6 s (limit 0.5 s) while paused"
    assert stopped("T", 100.0, 100.4, COMPUTING, LIMITS) is None


@pytest.mark.parametrize("state", list("RSDtZXI"))
def test_only_a_stop_by_a_signal_is_one(state: str) -> None:
    """A debugger's victim (t) is meant to stand still; the dead (Z, X) are somebody else's business."""
    assert stopped(state, 0.0, 1e9, COMPUTING, LIMITS) is None


def test_who_waits_for_longer_than_ever_says_so() -> None:
    found = held_up(EXCHANGING, 115.0, LIMITS)

    assert found is not None and (found.cause, found.phase) == ("waiting", "exchanging")
    assert held_up(EXCHANGING, 109.0, LIMITS) is None
    assert held_up(COMPUTING, 1e9, LIMITS) is None


def test_a_clock_of_another_host_is_brought_in_line() -> None:
    there = replace(COMPUTING, since=9100.0, beat=9101.0)

    assert there.shifted(-9000.0) == replace(COMPUTING, beat=101.0)


doings = st.builds(
    doing,
    st.sampled_from(list(Phase)),
    usual_s=st.one_of(st.none(), st.floats(0, 5000)),
    since=st.floats(0, 1000),
    commits=st.integers(0, 10),
)
limits = st.builds(
    HangLimits,
    limit_s=st.floats(0.1, 100),
    factor=st.floats(1, 100),
    first_step_limit_s=st.floats(0.1, 1000),
)


@given(doings, limits)
def test_no_limit_is_below_the_floor_nor_below_what_was_usual(one: Doing, given_limits: HangLimits) -> None:
    limit = limit_for(one, given_limits)

    if limit is not None:
        assert limit >= given_limits.limit_s
        usual_s = one.longest[one.phase]
        if usual_s is not None and one.commits >= FIRST_STEPS:
            assert limit >= min(usual_s, given_limits.factor * usual_s)


@given(doings, limits, SECONDS, SECONDS)
def test_once_overdue_is_overdue_until_it_gets_on(
    one: Doing, given_limits: HangLimits, now: float, more: float
) -> None:
    if overdue(one, now, given_limits) is not None:
        assert overdue(one, now + more, given_limits) is not None


@given(st.sampled_from(JUDGED), st.floats(0, 100), st.floats(0, 100), limits)
def test_slower_work_has_no_shorter_limit(phase: Phase, one_s: float, other_s: float, given_limits: HangLimits) -> None:
    short, long = sorted((one_s, other_s))
    shorter, longer = (limit_for(doing(phase, usual_s=usual), given_limits) for usual in (short, long))

    assert shorter is not None and longer is not None and shorter <= longer
