"""Which route a plan takes: by the members' hosts and replicas, and by the connections that they have."""

from __future__ import annotations

from craft.decide.step.replicas import Layout
from craft.groups.gloo import GlooGroup
from craft.groups.subgroup import part_of
from craft.protocol.membership import Slot
from craft.worker.reduce.routes.choice import route_of

from ...blocks import layout_of
from ...members import together


def test_only_the_group_of_two_itself_uses_its_direct_connection() -> None:
    """Twins and the reductions of ``job.attempts`` exchange at the same time, in another order, or between other ranks."""

    def act(group: GlooGroup) -> list[str]:
        layout, twins = layout_of((7,), 100), Layout(1, (Slot(0, 0), Slot(1, 0)))
        routes = [
            route_of(group, "ab", layout, (0, 1)),
            route_of(group, "aa", layout, (0, 1)),
            route_of(part_of(group, [0, 1], 1000), "ab", layout, (0, 1)),
            route_of(group, "ab", layout, (0, 1), twins),
        ]
        return [type(route).__name__ for route in routes]

    assert together(2, act) == [["DirectRoute", "DirectRoute", "FlatRoute", "TwinRoute"]] * 2


def test_three_members_have_no_direct_connection() -> None:
    def act(group: GlooGroup) -> str:
        return type(route_of(group, "abc", layout_of((7,), 100), (0, 1, 2))).__name__

    assert together(3, act) == ["FlatRoute"] * 3
