"""Small messages from every member to every member."""

from __future__ import annotations

import pytest

from craft.worker.membership.all_gather import gather

from ..members import together

MESSAGES = [b"", b"\0\xff", b"a" * 5000, b""]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_everybody_gets_everybodys_bytes_in_the_order_of_ranks(size: int) -> None:
    found = together(size, lambda group: gather(group, MESSAGES[group.rank]))

    assert found == [MESSAGES[:size]] * size


def test_nobody_may_have_anything_to_say() -> None:
    assert together(3, lambda group: gather(group, b"")) == [[b""] * 3] * 3


def test_alone_one_hears_oneself() -> None:
    assert gather(None, b"x") == [b"x"]
