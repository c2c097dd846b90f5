"""Donors that leave no threads behind. Hypothesis without a clock: a machine is slow at times, and no test may fail for that."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import settings

from craft.snapshots.transfer.donor import Donor

from .travel import HERE, KEY, wait_until

settings.register_profile("craft", deadline=None, database=None, derandomize=True)
settings.load_profile("craft")


@pytest.fixture
def donors() -> Iterator[list[Donor]]:
    three = [Donor(HERE, KEY) for _ in range(3)]
    yield three
    for each in three:
        each.close()
    # A stripe that was replaced may still be hashed to its end.
    wait_until(lambda: not [each for each in threading.enumerate() if each.name.startswith(("craft-d", "craft-f"))])


@pytest.fixture
def donor(donors: list[Donor]) -> Donor:
    return donors[0]
