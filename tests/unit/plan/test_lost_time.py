"""The formulas of lost time, against a job that is played through."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from craft.decide.step.interval import first_order
from craft.plan.lost_time import Absence, best_interval, saved_share, working_share

from .simulated import Answer, Job

HOUR = 3600.0


def slower(missing: int) -> float:
    return 1 / (1 + 0.25 * math.ceil(missing / 2))


@pytest.mark.parametrize(
    ("rate", "answer"),
    [
        (1 / (2 * HOUR), Answer(interval_s=900, stall_s=40, restart_s=360)),
        (1 / HOUR, Answer(interval_s=1800, stall_s=10, restart_s=900)),
        (1 / HOUR, Answer(interval_s=1200, stall_s=3, write_s=400, restart_s=300)),
        (1 / (10 * HOUR), Answer(interval_s=3600, stall_s=240, restart_s=60)),
    ],
)
def test_what_checkpoints_save_is_what_a_job_that_is_played_keeps(rate: float, answer: Answer) -> None:
    played = Job(10, 0.0, rate, answer).play(20_000 / rate)
    computed = saved_share(rate, answer.interval_s, answer.stall_s, answer.restart_s + answer.write_s)
    assert computed == pytest.approx(played.goodput, rel=0.01)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(pause_s=60, replace_s=1800, speed=slower),
        Answer(pause_s=300, replace_s=1800, speed=lambda missing: 1 - missing / 200),
        Answer(pause_s=20, join_s=400, replace_s=7200, spares=2, speed=slower),
        Answer(pause_s=20, join_s=120, replace_s=7200, spares=1, speed=lambda missing: float(missing == 0)),
        Answer(pause_s=20, join_s=900, replace_s=3600, spares=3, speed=lambda missing: float(missing == 0)),
        Answer(pause_s=300, replace_s=600, speed=lambda missing: float(missing == 0)),
    ],
)
def test_those_who_are_left_get_on_as_in_a_job_that_is_played(answer: Answer) -> None:
    units, rate = 200, 1 / HOUR
    played = Job(units, rate, 0.0, answer).play(30_000 / rate)
    absence = Absence(
        rate=rate, pause_s=answer.pause_s, join_s=answer.join_s, replace_s=answer.replace_s, spares=answer.spares
    )
    assert working_share(absence, units, answer.speed) == pytest.approx(played.goodput, rel=0.02)


@pytest.mark.parametrize(("units", "replace_s", "hours"), [(1, 0.0, 2e4), (2, 400.0, 4e4), (3, 900.0, 1e5)])
def test_nobody_is_left_as_often_as_in_a_job_that_is_played(units: int, replace_s: float, hours: float) -> None:
    rate = 1 / HOUR
    absence = Absence(rate=rate, pause_s=0.0, join_s=60.0, replace_s=replace_s)
    expected = absence.end_rate(units) * hours * HOUR
    assert Job(units, rate, 0.0, Answer(replace_s=replace_s)).play(hours * HOUR).ends == pytest.approx(
        expected, rel=0.15
    )
    with_a_spare = Answer(join_s=60.0, replace_s=replace_s, spares=1)
    assert Job(units, rate, 0.0, with_a_spare).play(hours * HOUR).ends <= 1.15 * expected


def test_for_a_small_cost_the_best_interval_is_the_root_of_twice_cost_times_time_between_failures() -> None:
    assert best_interval(1 / (24 * HOUR), 1.0) == pytest.approx(first_order(1.0, 24 * HOUR), rel=0.01)
    assert best_interval(0.0, 1.0) == math.inf and best_interval(1.0, 0.0) == 0.0


rates = st.floats(1e-9, 1e-2)


@given(rates, st.floats(0.01, 1e4), st.floats(0, 1e4), st.floats(0.1, 0.999))
def test_at_the_best_interval_more_is_saved_than_at_any_other(
    rate: float, stall_s: float, back_s: float, factor: float
) -> None:
    best = best_interval(rate, stall_s)
    most = saved_share(rate, best, stall_s, back_s)
    assert 0 <= most <= 1
    for other in (best * factor, best / factor):
        assert saved_share(rate, other, stall_s, back_s) <= most * (1 + 1e-9)


@given(rates, rates, st.floats(1.0, 1e5), st.floats(0.01, 1e4), st.floats(0, 1e4))
def test_oftener_failures_leave_less(rate: float, more: float, every_s: float, stall_s: float, back_s: float) -> None:
    assert saved_share(rate + more, every_s, stall_s, back_s) <= saved_share(rate, every_s, stall_s, back_s)


@given(
    rates, rates, st.floats(0, 600), st.floats(0, 600), st.floats(0, 2 * HOUR), st.integers(0, 5), st.integers(2, 100)
)
def test_the_share_of_those_who_are_left_is_one_and_falls_with_the_rate(
    rate: float, more: float, pause_s: float, join_s: float, replace_s: float, spares: int, units: int
) -> None:
    def share(losses: float) -> float:
        absence = Absence(rate=losses, pause_s=pause_s, join_s=join_s, replace_s=replace_s, spares=spares)
        return working_share(absence, units, slower)

    assert 0 <= share(rate + more) <= share(rate) + 1e-9 <= 1 + 1e-9
