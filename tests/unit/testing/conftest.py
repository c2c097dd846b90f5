"""The files of a run, for tests of what checks them."""

from __future__ import annotations

from pathlib import Path

import pytest

from .runs import Files


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "run")
