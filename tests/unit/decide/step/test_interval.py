"""How often checkpoints are taken."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from craft.decide.step.interval import (
    MAX_INTERVAL_S,
    MIN_INTERVAL_S,
    PRIOR_MTBF_S,
    Every,
    choose,
    parse_duration,
    parse_every,
)
from craft.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", Every()),
        ("500 steps", Every(steps=500)),
        ("1 step", Every(steps=1)),
        ("1 epoch", Every(epochs=1)),
        ("2 epochs", Every(epochs=2)),
        ("10min", Every(seconds=600.0)),
        (" 1.5 h ", Every(seconds=5400.0)),
        ("30 s", Every(seconds=30.0)),
    ],
)
def test_what_people_write_is_understood(text: str, expected: Every) -> None:
    assert parse_every(text) == expected


@pytest.mark.parametrize(
    "text", ["", "often", "10", "0 steps", "2.5 steps", "1.5 epochs", "-3 s", "10 parsecs", "steps 10"]
)
def test_what_is_none_of_these_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match="every="):
        parse_every(text)


def test_it_is_the_root_of_twice_cost_times_time_between_failures() -> None:
    chosen = choose(cost_s=0.5, write_s=1.0, elapsed_s=0.0, failures=0)
    assert chosen.interval_s == pytest.approx(math.sqrt(2 * 0.5 * PRIOR_MTBF_S))
    assert "costs 500.0 ms" in chosen.reason and "0 failures in 0 s" in chosen.reason


def test_failures_that_were_seen_make_it_shorter_and_a_quiet_time_longer() -> None:
    usual = choose(0.1, 0.1, 3600.0, 0).interval_s
    assert choose(0.1, 0.1, 3600.0, 5).interval_s < usual < choose(0.1, 0.1, 360_000.0, 0).interval_s


def test_it_is_never_so_short_that_one_is_not_complete_when_the_next_is_due() -> None:
    chosen = choose(cost_s=1e-6, write_s=40.0, elapsed_s=100.0, failures=3)
    assert chosen.interval_s == 80.0 and "writing one takes 40.0 s" in chosen.reason


@given(*[st.floats(0, 1e5)] * 3, st.integers(0, 10_000))
def test_it_stays_within_reason(cost_s: float, write_s: float, elapsed_s: float, failures: int) -> None:
    chosen = choose(cost_s, write_s, elapsed_s, failures)
    assert MIN_INTERVAL_S <= chosen.interval_s <= MAX_INTERVAL_S


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("12 s", 12.0),
        ("350ms", 0.35),
        ("6 min", 360.0),
        ("50,000 hours", 1.8e8),
        ("1.5 H", 5400.0),
        ("2 days", 172800.0),
    ],
)
def test_durations_that_people_write_are_understood(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "12", "s", "-1 s", "1 parsec", "1e999 h", "1 s 2", "nan s"])
def test_what_is_no_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a duration"):
        parse_duration(text)
