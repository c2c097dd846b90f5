"""Fixtures of tests with real processes, and the police that finds processes left behind."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from .jobs import SESSION_VARIABLE, Jobs, References, leftovers


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left_behind() -> Iterator[None]:
    """Whatever was started by any test here, by whichever way, must have ended when the last test has."""
    os.environ[SESSION_VARIABLE] = uuid.uuid4().hex
    yield
    left = list(leftovers(limit_s=10))
    del os.environ[SESSION_VARIABLE]
    assert not left, "left behind: " + ", ".join(left)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    """Starts jobs, and ends them with the test."""
    jobs = Jobs(tmp_path)
    yield jobs
    jobs.end()


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    """What undisturbed runs end with."""
    jobs = Jobs(tmp_path_factory.mktemp("references"))
    yield References(jobs)
    jobs.end()
