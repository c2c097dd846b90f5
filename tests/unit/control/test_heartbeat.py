from __future__ import annotations

from typing import TYPE_CHECKING

from craft.control.heartbeat import Heartbeats

if TYPE_CHECKING:
    from tests.unit.control.conftest import FakeClock


class Watched:
    """Heartbeats with a limit of 1 s, and the hosts that fell silent."""

    def __init__(self, clock: FakeClock) -> None:
        self.silent: list[str] = []
        self.beats = Heartbeats(1.0, clock, lambda host, silent_s: self.silent.append(host))


def test_a_host_that_is_heard_in_time_is_never_silent(clock: FakeClock) -> None:
    watched = Watched(clock)
    for _ in range(50):
        watched.beats.heard("a")
        clock.pass_s(0.9)
    assert watched.silent == []


def test_a_silent_host_is_named_once_after_the_limit(clock: FakeClock) -> None:
    watched = Watched(clock)
    watched.beats.heard("a")
    clock.pass_s(0.6)
    watched.beats.heard("a")
    clock.pass_s(0.99)
    assert watched.silent == []
    clock.pass_s(0.02)
    assert watched.silent == ["a"]
    clock.pass_s(10.0)
    assert watched.silent == ["a"]


def test_a_host_that_came_back_can_fall_silent_again(clock: FakeClock) -> None:
    watched = Watched(clock)
    watched.beats.heard("a")
    clock.pass_s(2.0)
    watched.beats.heard("a")
    clock.pass_s(2.0)
    assert watched.silent == ["a", "a"]


def test_one_silent_host_says_nothing_about_another(clock: FakeClock) -> None:
    watched = Watched(clock)
    watched.beats.heard("a")
    for _ in range(10):
        watched.beats.heard("b")
        clock.pass_s(0.5)
    assert watched.silent == ["a"]


def test_an_expected_host_that_never_comes_is_silent_after_its_own_limit(clock: FakeClock) -> None:
    watched = Watched(clock)
    watched.beats.expect("a", 3.0)
    clock.pass_s(2.9)
    assert watched.silent == []
    clock.pass_s(0.2)
    assert watched.silent == ["a"]


def test_a_lighthouse_that_was_stopped_itself_blames_nobody_at_once(clock: FakeClock) -> None:
    watched = Watched(clock)
    watched.beats.heard("a")
    clock.stall_s(30.0)
    assert watched.silent == []
    clock.pass_s(1.1)
    assert watched.silent == ["a"]


def test_a_lighthouse_that_is_always_late_still_finds_a_silent_host(clock: FakeClock) -> None:
    watched = Watched(clock)
    watched.beats.heard("a")
    for _ in range(3):
        clock.stall_s(1.5)
    assert watched.silent == ["a"]


def test_an_expected_host_that_came_and_fell_silent_is_named_after_the_usual_limit(clock: FakeClock) -> None:
    watched = Watched(clock)
    watched.beats.expect("a", 3.0)
    clock.pass_s(0.5)
    watched.beats.heard("a")
    clock.pass_s(1.1)
    assert watched.silent == ["a"]
    clock.pass_s(5.0)
    assert watched.silent == ["a"]
