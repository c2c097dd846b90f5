"""These tests need a GPU. Where there is none they are skipped, and say so; `make test-gpu` refuses to begin."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from tests.integration.conftest import jobs, no_process_is_left_behind, references
from tests.unit.groups.conftest import cast, stage

__all__ = ["cast", "jobs", "no_process_is_left_behind", "references", "stage"]

_NEEDS = "needs an NVIDIA GPU, and a torch that was built for it"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    if not torch.cuda.is_available():
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=_NEEDS))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tell of a failure at once: a run that is cut off at its limit would say nothing of it."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid}\n{report.longreprtext[-4000:]}", file=sys.__stderr__, flush=True)
