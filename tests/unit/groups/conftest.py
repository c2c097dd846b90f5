from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker

import pytest

from .cast import Cast


@pytest.fixture(scope="session")
def stage() -> Iterator[None]:
    """The process that players are forked from, and the one that follows it, would otherwise outlive the last test."""
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


@pytest.fixture
def cast(stage: None) -> Iterator[Cast]:
    cast = Cast()
    yield cast
    cast.end()
