from __future__ import annotations

from typing import TYPE_CHECKING

from craft.control.agents.heartbeat import RETURN_LIMITS, Heartbeats

if TYPE_CHECKING:
    from tests.unit.control.conftest import FakeClock


class Watched:
    """Heartbeats with a limit of 1 s, the hosts that fell silent, and how often the lighthouse was alone and not alone."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.silent: list[str] = []
        self.alone: list[float] = []
        self.back: list[str] = []
        self.beats = Heartbeats(1.0, clock, self)

    def on_silent(self, host: str, silent_s: float) -> None:
        self.silent.append(host)

    def on_alone(self, silent_s: float) -> None:
        self.alone.append(silent_s)

    def on_heard(self, host: str, alone_s: float) -> None:
        self.back.append(host)

    def pass_s(self, duration_s: float, *living: str) -> None:
        """Let time pass, in which the living are heard every tenth of a second."""
        for _ in range(round(duration_s * 10)):
            for host in living:
                self.beats.heard(host)
            self.clock.pass_s(0.1)


def test_a_host_that_is_heard_in_time_is_never_silent(clock: FakeClock) -> None:
    watched = Watched(clock)
    for _ in range(50):
        watched.beats.heard("a")
        clock.pass_s(0.9)
    assert (watched.silent, watched.alone) == ([], [])


def test_a_silent_host_is_named_once_after_the_limit(clock: FakeClock) -> None:
    watched = Watched(clock)
    watched.pass_s(0.6, "a", "b")
    watched.beats.heard("a")
    watched.pass_s(0.9, "b")
    assert watched.silent == []
    watched.pass_s(0.2, "b")
    assert watched.silent == ["a"]
    watched.pass_s(10.0, "b")
    assert (watched.silent, watched.alone) == (["a"], [])


def test_a_host_that_came_back_can_fall_silent_again(clock: FakeClock) -> None:
    watched = Watched(clock)
    for _ in range(2):
        watched.beats.heard("a")
        watched.pass_s(2.0, "b")
    assert watched.silent == ["a", "a"]


def test_one_silent_host_says_nothing_about_others(clock: FakeClock) -> None:
    watched = Watched(clock)
    watched.beats.heard("a")
    watched.pass_s(5.0, "b", "c")
    assert watched.silent == ["a"]


def test_an_expected_host_that_never_comes_is_silent_after_its_own_limit(clock: FakeClock) -> None:
    watched = Watched(clock)
    watched.beats.expect("a", 3.0)
    watched.pass_s(2.9, "b")
    assert watched.silent == []
    watched.pass_s(0.2, "b")
    assert watched.silent == ["a"]


def test_a_lighthouse_that_was_stopped_itself_blames_nobody_at_once(clock: FakeClock) -> None:
    watched = Watched(clock)
    watched.pass_s(1.0, "a", "b")
    clock.stall_s(30.0)
    assert (watched.silent, watched.alone) == ([], [])
    watched.pass_s(1.2, "b")
    assert watched.silent == ["a"]


def test_a_lighthouse_that_is_always_late_still_finds_a_silent_host(clock: FakeClock) -> None:
    watched = Watched(clock)
    watched.beats.heard("a")
    for _ in range(8):
        clock.stall_s(0.45)
        watched.beats.heard("b")
    assert watched.silent == ["a"]


def test_an_expected_host_that_came_and_fell_silent_is_named_after_the_usual_limit(clock: FakeClock) -> None:
    watched = Watched(clock)
    watched.beats.expect("a", 3.0)
    watched.pass_s(0.5, "b")
    watched.beats.heard("a")
    watched.pass_s(1.2, "b")
    assert watched.silent == ["a"]
    watched.pass_s(5.0, "b")
    assert watched.silent == ["a"]


def test_when_everybody_falls_silent_nobody_is_lost_and_it_is_said_once(clock: FakeClock) -> None:
    watched = Watched(clock)
    watched.pass_s(2.0, "a", "b", "c")
    clock.pass_s(100.0)
    assert (watched.silent, len(watched.alone), watched.back) == ([], 1, [])


def test_the_only_host_is_waited_for(clock: FakeClock) -> None:
    watched = Watched(clock)
    watched.beats.heard("a")
    clock.pass_s(100.0)
    watched.pass_s(3.0, "a")
    assert (watched.silent, len(watched.alone), watched.back) == ([], 1, ["a"])


def test_after_contact_is_back_every_host_has_time_to_be_heard_again(clock: FakeClock) -> None:
    watched = Watched(clock)
    watched.pass_s(2.0, "a", "b")
    clock.pass_s(10.0)
    watched.pass_s(RETURN_LIMITS - 0.1, "a")
    assert (watched.silent, watched.back) == ([], ["a"])
    watched.pass_s(5.0, "a", "b")
    assert watched.silent == []


def test_a_host_that_stays_silent_after_contact_is_back_is_lost_then(clock: FakeClock) -> None:
    watched = Watched(clock)
    watched.pass_s(2.0, "a", "b")
    clock.pass_s(10.0)
    watched.pass_s(RETURN_LIMITS + 0.2, "a")
    assert watched.silent == ["b"]


def test_all_hosts_silent_again_after_contact_is_a_second_time_alone(clock: FakeClock) -> None:
    watched = Watched(clock)
    for _ in range(2):
        watched.pass_s(4.0, "a", "b")
        clock.pass_s(10.0)
    assert (watched.silent, len(watched.alone), watched.back) == ([], 2, ["a"])


def test_hosts_that_fall_silent_one_after_the_other_are_lost_but_for_the_last(clock: FakeClock) -> None:
    watched = Watched(clock)
    watched.pass_s(1.0, "a", "b", "c")
    watched.pass_s(3.0, "b", "c")
    watched.pass_s(3.0, "c")
    clock.pass_s(30.0)
    assert (watched.silent, len(watched.alone)) == (["a", "b"], 1)
