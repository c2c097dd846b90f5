"""The table of tests that are left to ``make test-long``."""

from __future__ import annotations

from .variants import strays


def test_every_name_in_the_table_is_that_of_a_test_in_its_file() -> None:
    assert strays() == []
