"""The role of a technique, and how several of them compose."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from craft.decide.techniques import BUILT_IN, Alerts, Loss, LossSettings, defaults
from craft.decide.techniques.technique import POINTS, Chosen, Hooks, NoSettings, Technique, arrange
from craft.protocol.errors import ConfigError
from craft.protocol.events import AnyEvent


def kind(called: str, *before: str) -> type[Technique[Any]]:
    class Made(Technique[NoSettings]):
        name = called
        summary = "made for a test"

    Made.before = before
    return Made


def test_built_in_techniques_are_listed_in_the_order_in_which_they_are_asked() -> None:
    assert arrange(BUILT_IN) == list(BUILT_IN)


def test_one_of_another_package_is_asked_before_alerts_unless_it_says_otherwise() -> None:
    names = [each.name for each in arrange([*BUILT_IN, kind("thermal", "alerts"), kind("eager", "loss")])]
    assert names.index("loss") < names.index("thermal") < names.index("alerts")
    assert names.index("eager") < names.index("loss")


def test_the_order_of_craft_toml_counts_most() -> None:
    kinds = [kind("a", "b"), kind("b"), kind("c")]
    assert [each.name for each in arrange(kinds)] == ["a", "b", "c"]
    assert [each.name for each in arrange(kinds, ["c", "b", "a"])] == ["c", "b", "a"]


def test_two_that_each_want_to_be_first_are_refused() -> None:
    with pytest.raises(ConfigError, match="a, b"):
        arrange([kind("a", "b"), kind("b", "a")])


@pytest.mark.parametrize("built_in", BUILT_IN, ids=lambda each: each.name)
def test_a_built_in_technique_declares_what_it_is(built_in: type[Technique[Any]]) -> None:
    assert built_in.summary and not built_in.summary.endswith(".")
    settings = built_in.Settings()
    assert set(built_in.flags.values()) <= set(settings.__struct_fields__)
    assert set(built_in.shared) <= set(settings.__struct_fields__)
    assert set(built_in.points) <= set(POINTS)
    events = get_args(AnyEvent)
    assert all(event in events for event in (*built_in.emits, *built_in.answers))


def test_what_policies_answer_is_declared() -> None:
    """Every event that a built-in policy looks for is in its technique's list."""
    import inspect
    import re

    for built_in in BUILT_IN:
        for policy in built_in(built_in.Settings()).policies():
            source = inspect.getsource(type(policy).decide)
            named = {
                name for found in re.findall(r"isinstance\(event, ([^)]+)\)", source) for name in found.split(" | ")
            }
            missing = named - {event.__name__ for event in built_in.answers}
            assert not missing, f"{built_in.name}: {type(policy).__name__} answers {missing}"


def test_no_two_techniques_have_a_flag_in_common() -> None:
    flags = [flag for each in BUILT_IN for flag in each.flags]
    assert len(flags) == len(set(flags))


def test_a_technique_that_is_off_has_no_say() -> None:
    assert defaults().get(Alerts) is not None
    assert Chosen([]).get(Alerts) is None and Chosen([]).policies() == ()


def test_whoever_drops_microbatches_says_that_it_is_not_exact() -> None:
    assert defaults().get(Loss).inexact() is None  # type: ignore[union-attr]
    assert "dropped" in str(Loss(LossSettings(answer="shrink")).inexact())


def test_hooks_do_nothing_unless_they_are_overridden() -> None:
    assert all(callable(getattr(Hooks(), point)) for point in POINTS)
