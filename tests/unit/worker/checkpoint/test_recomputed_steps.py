"""Steps that are computed again must give what they gave before (P1)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from craft.protocol.errors import BitsDiffer
from craft.worker.checkpoint.earlier_results import RecomputedSteps


@pytest.fixture
def file(tmp_path: Path) -> Path:
    lines: list[dict[str, Any]] = [
        {"step": 3, "time": 1.0, "loss": 0.1},
        {"step": 4, "time": 2.0, "loss": 0.2, "size": None},
        {"step": 5, "time": 3.0, "loss": 0.3},
        {"step": 4, "branch": 1, "time": 4.0, "loss": 0.25},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 6, "lo')
    return path


def test_the_same_metrics_are_fine(file: Path) -> None:
    recomputed = RecomputedSteps.read(file, 4)
    recomputed.check(4, {"loss": 0.25})
    recomputed.check(5, {"loss": 0.3})
    recomputed.check(6, {"loss": 17.0})


def test_other_metrics_are_named_with_both_values(file: Path) -> None:
    with pytest.raises(BitsDiffer, match=r"step 5 .* gave loss 0\.30000000000000004 instead of 0\.3:"):
        RecomputedSteps.read(file, 4).check(5, {"loss": 0.1 + 0.2})


def test_a_rate_that_differs_beside_a_loss_that_agrees_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "time": 1.0, "loss": 0.5, "rate": 100.0}\n')
    RecomputedSteps.read(path, 0).check(0, {"loss": 0.5, "rate": 90.0})
    with pytest.raises(BitsDiffer, match="gave loss"):
        RecomputedSteps.read(path, 0).check(0, {"loss": 0.6, "rate": 90.0})


def test_a_step_without_metrics_in_common_is_fine(file: Path) -> None:
    RecomputedSteps.read(file, 4).check(5, {})


def test_steps_before_the_checkpoint_are_not_compared(file: Path) -> None:
    RecomputedSteps.read(file, 4).check(3, {"loss": 9.0})


def test_a_number_that_is_not_finite_is_the_same_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "time": 1.0, "loss": null}\n')
    RecomputedSteps.read(path, 0).check(0, {"loss": math.nan})


def test_a_file_that_is_not_there_expects_nothing(tmp_path: Path) -> None:
    RecomputedSteps.read(tmp_path / "none", 0).check(0, {"loss": 1.0})
