"""Finite spikes: what counts as one, and what does not."""

from __future__ import annotations

import random

import pytest

from craft.decide.detect.spikes import SpikeRule, find_spike, remember

RULE = SpikeRule(metric="loss", window=20, deviations=6.0)
TWICE = SpikeRule(metric="loss", window=20, ratio=2.0)


def falling(length: int = 20) -> list[float]:
    noise = random.Random(0)
    return [3.0 / (1 + step / 40) + noise.gauss(0, 0.05) for step in range(length)]


def test_a_value_far_above_the_others_is_a_spike_and_said_in_numbers() -> None:
    assert find_spike(2.9, falling(), RULE) is None
    said = find_spike(9.0, falling(), RULE)
    assert said is not None and said.startswith("loss is 9, ") and "deviations above the median of the last 20" in said


def test_a_ratio_is_another_way_to_say_it() -> None:
    assert find_spike(4.5, falling(), TWICE) is None
    assert (find_spike(9.0, falling(), TWICE) or "").startswith("loss is 9, 3.")
    assert find_spike(9.0, [-1.0] * 20, TWICE) is None, "there is no ratio to a median below 0"


def test_nothing_is_a_spike_before_the_window_is_full() -> None:
    assert find_spike(1e9, falling(19), RULE) is None


def test_what_falls_is_no_spike() -> None:
    assert find_spike(-1e9, falling(), RULE) is None


def test_one_spike_in_the_window_does_not_hide_the_next() -> None:
    recent = remember(falling(), 1e6, RULE)
    assert len(recent) == 20 and find_spike(9.0, recent, RULE) is not None


def test_what_stays_high_becomes_normal() -> None:
    recent = tuple(falling())
    found = []
    for _ in range(20):
        found.append(find_spike(9.0, recent, RULE) is not None)
        recent = remember(recent, 9.0, RULE)
    assert found[0] and not found[-1] and found == sorted(found, reverse=True)


@pytest.mark.parametrize("level", [0.0, 1.0])
def test_values_that_do_not_differ_make_no_spike_of_a_small_change(level: float) -> None:
    assert find_spike(level + 0.01, [level] * 20, RULE) is None
