"""``Trainer(strategy="craft")``: Lightning's fit through losses, joins, restarts and stops (P1 to P3)."""

from __future__ import annotations

import csv
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from craft.testing import Fault

from .jobs import Jobs, References, Result, describe

TRAIN_LIGHTNING = Path(__file__).parent / "scripts" / "train_lightning.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning" / "train_craft.py"
STEPS = 30
"""Of three epochs: 320 samples each, 4 in a batch, 4 workers, 2 batches accumulated."""
NUM_KILL_RUNS = int(os.environ.get("CRAFT_TEST_KILL_RUNS", "4"))
"""Jobs with random kills; 10 is the long version."""
WITH_OTHERS_IN_THEIR_PLACE = {"CRAFT_MAX_RESTARTS": "3"}


def ends(result: Result) -> dict[str, dict[str, Any]]:
    """By worker, where its trainer said that it ended; of those that came to the end."""
    found = {}
    for log in sorted(result.run_dir.glob("workers/*/log")):
        last = [line for line in log.read_text().splitlines() if line.startswith('{"global_step"')]
        if last:
            found[log.parent.name] = json.loads(last[-1])
    return found


@pytest.fixture(scope="module")
def undisturbed(references: References) -> str:
    return references.digest_of(TRAIN_LIGHTNING)


def steps_logged(result: Result) -> list[int]:
    """Steps of which the loss is in the only file that Lightning's logger made."""
    (file,) = (result.run_dir.parent / "logs").rglob("metrics.csv")
    with file.open() as opened:
        return [int(line["step"]) for line in csv.DictReader(opened) if line["train_loss_step"]]


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
    assert (end["global_step"], end["epoch"], end["seen"]) == (STEPS, 3, 2 * STEPS)
    assert sorted(end["metrics"]) == [
        "grad_norm", "lr-AdamW", "outlier_loss", "train_loss", "train_loss_epoch", "train_loss_step", "val_acc", "val_loss",
    ]  # fmt: skip
    assert end["rate"] < 0.001, "the schedule is at its end"
    kept = sorted(file.name for file in (result.run_dir.parent / "logs").rglob("*.ckpt"))
    assert len(kept) == 2 and end["best"] in kept
    assert steps_logged(result) == list(range(STEPS)), "by one worker after the other"


@pytest.mark.long
def test_a_trainer_that_was_preempted_in_an_epoch_goes_on_from_there_with_the_same_bits_P1_P7(
    jobs: Jobs, undisturbed: str, tmp_path: Path
) -> None:
    options = ("--checkpoints", str(tmp_path / "store"), "--resume")
    slow = ("--slow-until", str(tmp_path / "never"), "--slow-s", "0.05")
    job = jobs.start(TRAIN_LIGHTNING, *slow, options=options)
    job.reach_step(13)
    job.process.terminate()
    result = job.wait()
    assert result.exit_code == 75, describe(result)
    result = jobs.run(TRAIN_LIGHTNING, options=options, workers=4)
    assert result.digest == undisturbed, describe(result)
    end = the_end(result)
    assert (end["global_step"], end["epoch"], end["seen"]) == (STEPS, 3, 2 * STEPS)


def test_the_example_of_the_docs_runs(jobs: Jobs) -> None:
    result = jobs.run(EXAMPLE, workers=2)
    assert result.exit_code == 0, describe(result)
    said = [(result.run_dir / "workers" / worker / "log").read_text() for worker in ("w0", "w1")]
    assert all("after 32 steps" in each for each in said)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(NUM_KILL_RUNS))
def test_kills_at_random_moments_of_a_trainer_do_not_change_a_bit_P1_P2_P3(
    jobs: Jobs, undisturbed: str, seed: int
) -> None:
    """In training, in validation, while a checkpoint of Lightning's own is written; up to three of four."""
    chance = random.Random(seed)
    kills = sorted((chance.randrange(STEPS - 4), chance.random()) for _ in range(chance.randint(1, 3)))
    job = jobs.start(TRAIN_LIGHTNING, environment=WITH_OTHERS_IN_THEIR_PLACE if seed % 2 else None)
    living = ["w0", "w1", "w2", "w3"]
    for step, share in kills:
        job.reach_step(step)
        # Anywhere within the next steps.
        time.sleep(0.2 * share)
        job.kill(living.pop(chance.randrange(len(living))))
    job.wait().assert_exact(undisturbed, faults=len(kills), steps=STEPS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        (("--package", "pytorch_lightning"), STEPS),
        (("--precision", "bf16-mixed"), STEPS),
        (("--steps", "13", "--accumulate", "1"), 13),
        (("--epochs", "12", "--patience", "1"), None),
    ],
)
def test_a_loss_does_not_change_a_bit_however_the_trainer_is_set_up_P1(
    jobs: Jobs, references: References, arguments: tuple[str, ...], steps: int | None
) -> None:
    """The other package, mixed precision, a number of steps, an end that depends on what was measured."""
    expected = references.digest_of(TRAIN_LIGHTNING, *arguments)
    result = jobs.run(TRAIN_LIGHTNING, *arguments, faults=[Fault(point="batch", step=7, rank=1)])
    result.assert_exact(expected, faults=1, steps=steps)
    end = the_end(result, workers=3)
    assert end["global_step"] == (steps or end["global_step"])
