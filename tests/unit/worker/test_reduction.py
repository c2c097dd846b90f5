"""Reductions in the body of an attempt: who takes part, and that all reduce the same."""

from __future__ import annotations

from craft.groups.gloo import GlooGroup
from craft.protocol.errors import ConfigError

from .members import together
from .reducing import BOTH, Reducing, a_third_one_comes


def test_whoever_keeps_pace_from_now_on_takes_part_though_there_is_nothing_for_it_to_compute_P1() -> None:
    assert together(3, a_third_one_comes) == [""] * 3


def test_workers_that_reduce_different_gradients_in_the_same_place_are_told_so() -> None:
    """Before anything of it is sent: no lengths are compared where gradients travel."""

    def act(group: GlooGroup) -> str:
        worker = Reducing(group)
        worker.begin(4, (), 3)
        return worker.body(BOTH if worker.worker_id != "w1" else BOTH[::-1])

    errors = together(3, act)
    assert all(
        isinstance(error, ConfigError) and "step 4: workers reduce different gradients" in str(error)
        for error in errors
    )
