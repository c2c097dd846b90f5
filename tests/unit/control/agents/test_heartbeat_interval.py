from __future__ import annotations

from craft.control.agents.heartbeat_interval import limit_for, pace_for
from craft.protocol.heartbeats import Pace


def test_few_agents_report_everything_at_once() -> None:
    assert pace_for(1, Pace()) == pace_for(20, Pace()) == Pace(heartbeat_s=0.1, progress_s=0.0)


def test_above_two_hundred_agents_heartbeats_are_a_quarter_of_a_second_apart() -> None:
    assert pace_for(200, Pace()).heartbeat_s == 0.1
    assert pace_for(201, Pace()).heartbeat_s == 0.25


def test_one_agent_that_comes_and_goes_changes_the_pace_once() -> None:
    pace = Pace()
    seen = []
    for agents in (200, 201, 200, 201, 199, 201):
        following = pace_for(agents, pace)
        seen.append(following != pace)
        pace = following
    assert seen == [True, True, False, False, False, False]


def test_a_job_that_shrinks_is_fast_again() -> None:
    assert pace_for(10, pace_for(1000, Pace())) == Pace()


def test_the_limit_on_silence_follows_the_pace() -> None:
    assert limit_for(1.0, Pace()) == 1.0
    assert limit_for(1.0, Pace(heartbeat_s=0.25)) == 2.5
