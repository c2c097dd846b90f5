"""``CraftTrainer``: Hugging Face's Trainer through losses, joins, restarts and stops (P1 to P3)."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from craft.testing import Fault

from .jobs import Jobs, References, Result, describe

TRAIN_HUGGINGFACE = Path(__file__).parent / "scripts" / "train_huggingface.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "huggingface" / "train_craft.py"
STEPS = 30
"""Of three epochs: 320 samples each, 4 in a batch, 4 workers, 2 batches accumulated."""
NUM_KILL_RUNS = int(os.environ.get("CRAFT_TEST_KILL_RUNS", "4"))
"""Jobs with random kills; 10 is the long version."""
WITH_OTHERS_IN_THEIR_PLACE = {"CRAFT_MAX_RESTARTS": "3"}


def ends(result: Result) -> dict[str, dict[str, Any]]:
    """By worker, where its Trainer said that it ended; of those that came to the end."""
    found = {}
    for log in sorted(result.run_dir.glob("workers/*/log")):
        last = [line for line in log.read_text().splitlines() if line.startswith('{"global_step"')]
        if last:
            found[log.parent.name] = json.loads(last[-1])
    return found


@pytest.fixture(scope="module")
def undisturbed(references: References) -> str:
    return references.digest_of(TRAIN_HUGGINGFACE)


def the_end(result: Result, workers: int = 4) -> dict[str, Any]:
    """Where all Trainers ended; every one at the same place, with the same logs."""
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
        TRAIN_HUGGINGFACE, "--slow-until", str(all_are_there), faults=faults, environment=WITH_OTHERS_IN_THEIR_PLACE
    )
    job.wait_for_committing(6)
    all_are_there.touch()
    result = job.wait()
    result.assert_exact(undisturbed, faults=2, steps=STEPS)
    end = the_end(result)
    assert (end["global_step"], end["epoch"], end["seen"]) == (STEPS, 3, STEPS)
    assert end["logged_at"] == list(range(2, STEPS + 1, 2))
    assert end["tokens"] == 3 * 320 * 12
    kept = sorted(folder.name for folder in (result.run_dir.parent / "out").glob("checkpoint-*"))
    assert len(kept) == 2 and end["best"] in kept
    for folder in kept:
        assert (result.run_dir.parent / "out" / folder / "trainer_state.json").exists()
