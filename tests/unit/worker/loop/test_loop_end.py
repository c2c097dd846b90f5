"""Ranks after a loop: those of its end; a worker that comes later has that of the one it stands in for."""

from __future__ import annotations

import pytest

from craft.worker.loop.loop_end import seats_of


@pytest.mark.parametrize(
    ("members", "seats"),
    [
        (["a", "b", "c"], ["a", "b", "c"]),
        # In a new generation the survivors have other ranks; here they keep theirs.
        (["b", "c", "d"], ["d", "b", "c"]),
        (["b", "c"], ["a", "b", "c"]),
        (["c", "d", "e"], ["d", "e", "c"]),
        # One that was still catching up at the end has a rank beyond.
        (["a", "b", "c", "d"], ["a", "b", "c", "d"]),
        (["b", "c", "d", "e"], ["d", "b", "c", "e"]),
    ],
)
def test_a_newcomer_takes_the_rank_of_a_lost_worker(members: list[str], seats: list[str]) -> None:
    assert seats_of(["a", "b", "c"], members) == seats
