"""Who is to leave where members' words contradict each other: newcomers, never those who trained all the time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from craft.decide.step.combine import combine
from craft.protocol.control_word import Combined, UnequalBuffer, Word


def said(*words: Mapping[str, Any]) -> Combined:
    return combine([Word(step=7, **word) for word in words])


@pytest.mark.parametrize("field", ["digest", "probe", "state"])
def test_a_newcomer_that_differs_from_all_others_leaves(field: str) -> None:
    found = said({field: b"a"}, {field: b"b", "newcomer": True}, {field: b"a"})
    assert found.differs and found.outcasts == (1,)


def test_two_newcomers_that_differ_in_different_ways_leave_and_one_that_agrees_stays() -> None:
    others: list[dict[str, Any]] = [{"state": b"a"}, {"state": b"a", "newcomer": True}]
    found = said({"state": b"b", "newcomer": True}, *others, {"state": b"c", "newcomer": True})
    assert found.outcasts == (0, 3)


def test_nobody_leaves_where_those_differ_who_trained_all_the_time() -> None:
    found = said({"digest": b"a"}, {"digest": b"b"}, {"digest": b"b", "newcomer": True})
    assert found.differs and found.outcasts == ()
    assert said({"state": b"a", "newcomer": True}, {"state": b"b", "newcomer": True}).outcasts == ()


def test_who_has_nothing_to_compare_differs_from_nobody() -> None:
    assert not said({"digest": b"a"}, {}, {"newcomer": True}, {"digest": b"a"}).differs


def test_a_buffer_that_one_member_changed_is_found_with_the_members() -> None:
    touched: dict[str, Any] = {"touched": ((3, b"x"), (5, b"y"))}
    nothing: dict[str, Any] = {"touched": ()}
    assert not said(touched, touched).differs and not said(nothing, nothing).differs
    found = said(nothing, touched, nothing, {"touched": None})
    assert found.unequal_buffer == UnequalBuffer(index=3, groups=((0, 2), (1,)))
    assert found.differs and found.outcasts == ()
    assert said(nothing, touched | {"newcomer": True}, nothing).outcasts == (1,)


def test_a_microbatch_that_was_computed_twice_is_compared_with_its_owners() -> None:
    owner, equal, other = (
        {"computed": ((0, b"x"), (1, b"y"))},
        {"repeated": ((1, b"y"),)},
        {"repeated": ((1, b"z"), (9, b"?"))},
    )
    assert not said(owner, equal).differs
    (found,) = said(owner, {}, other).repeated
    assert (found.microbatch, found.owner, found.other, found.equal) == (1, 0, 2, False)
    assert said(owner, {}, other).differs
