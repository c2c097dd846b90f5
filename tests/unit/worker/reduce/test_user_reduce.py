"""Reductions in the body of an attempt: who takes part, and that all reduce the same."""

from __future__ import annotations

import pytest

from craft.groups.gloo import GlooGroup
from craft.protocol.errors import ConfigError

from ..members import together
from ..reducing import BOTH, STEPS, Reducing, one_more_comes


@pytest.mark.parametrize("hosts", ["aaa", "aabbb"])
def test_whoever_keeps_pace_from_now_on_takes_part_though_there_may_be_nothing_for_it_to_compute_P1(hosts: str) -> None:
    found = together(len(hosts), lambda group: list(one_more_comes(group, hosts)))
    assert found == [[""] * STEPS] * len(hosts)


def test_workers_that_reduce_different_gradients_in_the_same_place_are_told_so() -> None:
    """Before anything of it is sent: no lengths are compared where gradients travel."""

    def act(group: GlooGroup) -> str:
        worker = Reducing(group, "aaa")
        worker.begin(4, (), 3)
        return worker.body(BOTH if worker.worker_id != "w1" else BOTH[::-1])

    for error in together(3, act):
        assert isinstance(error, ConfigError) and "step 4: workers reduce different gradients" in str(error)
