"""``Trainer(strategy="craft")``: Lightning's fit through losses, joins, restarts and stops (P1 to P3)."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from craft.testing import Fault

from .jobs import Jobs, References, Result, describe

TRAIN_LIGHTNING = Path(__file__).parent / "scripts" / "train_lightning.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning" / "train_craft.py"
STEPS = 30
"""Of three epochs: 320 samples each, 4 in a batch, 4 workers, 2 batches accumulated."""
WITH_OTHERS_IN_THEIR_PLACE = {"CRAFT_MAX_RESTARTS": "3"}


def ends(result: Result) -> dict[str, dict[str, Any]]:
    """By worker, where its trainer said that it ended; of those that came to the end."""
    found = {}
    for log in sorted(result.run_dir.glob("workers/*/log")):
        last = [line for line in log.read_text().splitlines() if line.startswith('{"global_step"')]
        if last:
            found[log.parent.name] = json.loads(last[-1])
    return found


def logged(result: Result) -> list[dict[str, str]]:
    with (result.run_dir.parent / "logs" / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def undisturbed(references: References) -> str:
    return references.digest_of(TRAIN_LIGHTNING)


def the_end(result: Result, workers: int = 4) -> dict[str, Any]:
    """Where all trainers ended; every one at the same place."""
    found = ends(result)
    assert len(found) == workers and len({json.dumps(each) for each in found.values()}) == 1, describe(result)
    return next(iter(found.values()))


def test_a_trainer_goes_on_through_losses_and_joins_with_the_same_bits_P1_P2_P3(
    jobs: Jobs, undisturbed: str, tmp_path: Path
) -> None:
    """The first is the one that writes logs and checkpoints; others come in the places of both, in the middle of an epoch."""
    all_are_there = tmp_path / "all_are_there"
    faults = [Fault(point="batch", step=3, rank=0), Fault(point="before_acknowledge", step=6, rank=2)]
    job = jobs.start(
        TRAIN_LIGHTNING, "--slow-until", str(all_are_there), faults=faults, environment=WITH_OTHERS_IN_THEIR_PLACE
    )
    job.wait_for_committing(6)
    all_are_there.touch()
    result = job.wait()
    result.assert_exact(undisturbed, faults=2, steps=STEPS)
    end = the_end(result)
    assert (end["global_step"], end["epoch"], end["seen"]) == (STEPS, 3, STEPS)
    assert sorted(end["metrics"]) == [
        "grad_norm", "lr-AdamW", "train_loss", "train_loss_epoch", "train_loss_step", "val_acc", "val_loss",
    ]  # fmt: skip
    assert end["rate"] < 0.001, "the schedule is at its end"
    kept = sorted(file.name for file in (result.run_dir.parent / "best").glob("*.ckpt"))
    assert len(kept) == 2 and end["best"] in kept
