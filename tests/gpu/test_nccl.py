"""Groups between devices: what every group must do, and what NCCL adds to it. All processes share one GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.unit.groups.cast import AT_ONCE_S, Cast
from tests.unit.groups.test_gloo import *  # noqa: F403  (the suite of all groups, here with devices)
from tests.unit.groups.test_gloo import opened

FREE_S = 9.0
"""It takes a fraction of a second, unless many share the device; a worker gives up after 10 s."""
NUM = 1 << 22


@pytest.fixture
def cast(stage: None) -> Iterator[Cast]:
    """In the place of the one whose groups are Gloo's alone."""
    cast = Cast(device="cuda:0")
    yield cast
    cast.end()


def test_devices_swap_what_they_hold(cast: Cast) -> None:
    left, right = cast.actors(2)
    opened(1, [left, right])

    assert left.ask("swap", 1, 1.5, NUM, 1).error == ""
    assert right.ask("swap", 1, -2.5, NUM, 0).error == ""

    assert left.ask("swapped", 1).value == [-2.5, -2.5]
    assert right.ask("swapped", 1).value == [1.5, 1.5]


@pytest.mark.parametrize("fate", ["killed", "stopped", "silent"])
def test_abort_frees_the_host_at_once_and_the_device_soon_P5(cast: Cast, fate: str) -> None:
    """The host is free in milliseconds; what hangs on the device ends without the help of the peer."""
    waiting, other, peer = cast.actors(3)
    opened(1, [waiting, other, peer])
    if fate == "killed":
        peer.kill()
    elif fate == "stopped":
        peer.stop()

    assert waiting.ask("swap", 1, 1.0, NUM, 2).error == ""
    waiting.ask("begin", "blocked", "swapped", 1)
    if fate != "killed":
        assert waiting.ask("running", "blocked").value is True
    assert waiting.ask("abort", 1).took_s < AT_ONCE_S
    assert waiting.ask("end", "blocked", AT_ONCE_S).error in ("GroupAborted", "GroupBroken")
    other.ask("abort", 1)
    assert waiting.ask("device_is_free", 1, FREE_S).value is True

    opened(2, [other, waiting])
    assert waiting.ask("swap", 2, 3.0, NUM, 0).error == ""
    assert other.ask("swap", 2, 4.0, NUM, 1).error == ""
    assert (waiting.ask("swapped", 2).value, other.ask("swapped", 2).value) == ([4.0, 4.0], [3.0, 3.0])


def test_a_killed_peer_shows_without_an_abort_P5(cast: Cast) -> None:
    waiting, peer = cast.actors(2)
    opened(1, [waiting, peer])
    assert waiting.ask("swap", 1, 1.0, NUM, 1).error == ""
    waiting.ask("begin", "blocked", "swapped", 1)

    peer.kill()

    assert waiting.ask("end", "blocked", 5.0).error == "GroupBroken"


def test_what_an_abort_left_half_received_is_never_taken_for_whole_P3(cast: Cast) -> None:
    """The stream goes on after an abort, over whatever was received: who asks then must hear of the abort."""
    waiting, peer = cast.actors(2)
    opened(1, [waiting, peer])
    assert waiting.ask("swap", 1, 1.0, NUM, 1).error == ""
    waiting.ask("abort", 1)
    assert waiting.ask("device_is_free", 1, FREE_S).value is True

    assert waiting.ask("swapped", 1).error == "GroupAborted"
    assert waiting.ask("swap", 1, 1.0, 4, 1).error == "GroupAborted"
