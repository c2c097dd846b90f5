"""``CraftTrainer``: Hugging Face's Trainer through losses, joins, restarts and stops (P1 to P3)."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from craft.testing import Fault

from .jobs import LIMIT_S, SCRIPTS, Jobs, References, Result, describe, wait_for

TRAIN_HUGGINGFACE = SCRIPTS / "train_huggingface.py"
SAME_AS_TRAINER = SCRIPTS / "same_as_trainer.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "huggingface" / "train_craft.py"
WORKERS = 3
STEPS = 28
"""Of two epochs: 320 samples each, 4 in a batch, 3 workers, 2 batches accumulated; in the last step of each, fewer."""
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


@pytest.fixture(scope="module", autouse=True)
def imported_once() -> Iterator[None]:
    """As one would who wants others in the place of lost workers soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CRAFT_PRELOAD", "transformers.trainer, transformers.models.gpt2.modeling_gpt2")
        yield


@pytest.fixture(scope="module")
def undisturbed(references: References) -> str:
    return references.digest_of(TRAIN_HUGGINGFACE, workers=WORKERS)


def the_end(result: Result, workers: int = WORKERS) -> dict[str, Any]:
    """Where all Trainers ended; every one at the same place, with the same logs."""
    found = ends(result)
    assert len(found) == workers and len({json.dumps(each) for each in found.values()}) == 1, describe(result)
    return next(iter(found.values()))


def test_a_trainer_goes_on_through_losses_and_joins_with_the_same_bits_P1_P2_P3(
    jobs: Jobs, undisturbed: str, tmp_path: Path
) -> None:
    """The first is the one that writes logs and checkpoints; others come in the places of both, in the middle of an epoch."""
    all_are_there = tmp_path / "all_are_there"
    faults = [Fault(point="batch", step=3, rank=0), Fault(point="before_acknowledge", step=6, rank=1)]
    slow = ("--slow-until", str(all_are_there))
    job = jobs.start(TRAIN_HUGGINGFACE, *slow, workers=WORKERS, faults=faults, environment=WITH_OTHERS_IN_THEIR_PLACE)
    job.wait_for_committing(WORKERS + 2)
    all_are_there.touch()
    result = job.wait()
    result.assert_exact(undisturbed, faults=2, steps=STEPS)
    end = the_end(result)
    assert (end["global_step"], end["epoch"], end["seen"]) == (STEPS, 2, STEPS)
    assert end["logged_at"] == list(range(2, STEPS + 1, 2))
    assert end["tokens"] > 0 and end["flos"] > 0
    kept = sorted(folder.name for folder in (result.run_dir.parent / "out").glob("checkpoint-*"))
    assert len(kept) == 2 and end["best"] in kept
    for folder in kept:
        assert (result.run_dir.parent / "out" / folder / "trainer_state.json").exists()


@pytest.mark.long
def test_a_trainer_that_was_preempted_in_an_epoch_goes_on_from_there_with_the_same_bits_P1_P7(
    jobs: Jobs, undisturbed: str, tmp_path: Path
) -> None:
    options = ("--checkpoints", str(tmp_path / "store"), "--resume")
    slow = ("--slow-until", str(tmp_path / "never"), "--slow-s", "0.05")
    job = jobs.start(TRAIN_HUGGINGFACE, *slow, options=options, workers=WORKERS)
    job.reach_step(17)
    job.process.terminate()
    result = job.wait()
    assert result.exit_code == 75, describe(result)
    result = jobs.run(TRAIN_HUGGINGFACE, options=options, workers=WORKERS)
    assert result.digest == undisturbed, describe(result)
    end = the_end(result)
    assert (end["global_step"], end["epoch"], end["seen"]) == (STEPS, 2, STEPS)
    assert end["logged_at"] == list(range(2, STEPS + 1, 2))


def test_a_trainer_goes_on_from_its_own_checkpoint_at_the_same_sample_also_through_a_loss_P1_P2(jobs: Jobs) -> None:
    """What comes out is what came out of the run that wrote the checkpoint: weights, losses, metrics."""
    before = jobs.run(TRAIN_HUGGINGFACE, workers=WORKERS)
    whole = the_end(before)
    kept = sorted((before.run_dir.parent / "out").glob("checkpoint-*"), key=lambda folder: int(folder.name[11:]))[0]
    done = int(kept.name[11:])
    assert 14 < done < STEPS - 1, describe(before)
    fault = Fault(point="batch", step=done + 1, rank=1)
    result = jobs.run(TRAIN_HUGGINGFACE, "--begin-from", str(kept), workers=WORKERS, faults=[fault])
    assert result.exit_code == 0, describe(result)
    later = the_end(result, workers=WORKERS - 1)
    # What was logged last: as with the Trainer, the first mean after the checkpoint is over fewer steps.
    assert later["losses"][-1] == whole["losses"][-1], describe(result)
    same = ("global_step", "epoch", "logged_at", "eval_loss", "weights")
    assert {name: later[name] for name in same} == {name: whole[name] for name in same}, describe(result)


@pytest.mark.long
def test_a_trainer_reads_an_iterable_dataset_through_a_loss_and_a_join_with_the_same_bits_P1(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    """The passes have 5 steps, the last one with fewer samples; the loss is in the second, the join in a later one."""
    streamed = ("--stream", "--steps", "13")
    expected = references.digest_of(TRAIN_HUGGINGFACE, *streamed, workers=WORKERS)
    all_are_there = tmp_path / "all_are_there"
    slow = ("--slow-until", str(all_are_there))
    fault = Fault(point="batch", step=6, rank=0)
    job = jobs.start(
        TRAIN_HUGGINGFACE, *streamed, *slow, workers=WORKERS, faults=[fault], environment=WITH_OTHERS_IN_THEIR_PLACE
    )
    job.wait_for_committing(WORKERS + 1)
    all_are_there.touch()
    result = job.wait()
    result.assert_exact(expected, faults=1, steps=13)
    end = the_end(result)
    assert (end["global_step"], int(end["epoch"]), end["seen"]) == (13, 2, 13)


@pytest.mark.long
def test_a_trainer_is_drained_and_the_others_are_stopped_in_the_middle_of_an_epoch(jobs: Jobs, tmp_path: Path) -> None:
    slow = ("--slow-until", str(tmp_path / "never"), "--slow-s", "0.3")
    job = jobs.start(TRAIN_HUGGINGFACE, *slow, workers=WORKERS, environment={"CRAFT_MAX_RESTARTS": "0"})
    job.reach_step(2)
    job.client.drain(worker_id="w1", reason="a test")
    wait_for(lambda: any(line.get("event") == "WorkerLeft" for line in job.journal()), "w1 has left")
    job.client.stop(reason="seen enough")
    result = job.wait()
    assert result.exit_code == 0, describe(result)
    assert len(result.digests) == 1, describe(result)
    end = the_end(result, workers=2)
    assert 2 < end["global_step"] == end["seen"] == job.steps() < STEPS


def test_gradients_and_losses_are_those_of_the_trainer_however_many_tokens_count_in_a_batch() -> None:
    """Up to the order in which numbers are added."""
    done = subprocess.run([sys.executable, SAME_AS_TRAINER], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["weights"] < 1e-6 and found["losses"] < 1e-5 and found["moved"] > 1e-3, found


def test_the_example_of_the_docs_runs(jobs: Jobs) -> None:
    result = jobs.run(EXAMPLE, workers=2)
    assert result.exit_code == 0, describe(result)
    said = [(result.run_dir / "workers" / worker / "log").read_text() for worker in ("w0", "w1")]
    assert all("after 64 steps" in each for each in said)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(NUM_KILL_RUNS))
def test_kills_at_random_moments_of_a_trainer_do_not_change_a_bit_P1_P2_P3(
    jobs: Jobs, undisturbed: str, seed: int
) -> None:
    """In training, in evaluation, while a checkpoint of the Trainer's own is written; up to two of three."""
    chance = random.Random(seed)
    kills = sorted((chance.randrange(STEPS - 4), chance.random()) for _ in range(chance.randint(1, 2)))
    environment = WITH_OTHERS_IN_THEIR_PLACE if seed % 2 else None
    job = jobs.start(TRAIN_HUGGINGFACE, workers=WORKERS, environment=environment)
    living = ["w0", "w1", "w2"]
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
        (("--model", "llama", "--scheduler", "cosine"), STEPS),
        (("--bf16",), STEPS),
        (("--compile",), STEPS),
        (("--steps", "13", "--accumulate", "1"), 13),
        (("--best", "--epochs", "1.5"), 21),
        (("--epochs", "8", "--patience", "1"), None),
    ],
)
def test_a_loss_does_not_change_a_bit_however_the_trainer_is_set_up_P1(
    jobs: Jobs, references: References, arguments: tuple[str, ...], steps: int | None
) -> None:
    """Another model, mixed precision, compiled, a number of steps, the best weights at the end, an end by what was measured."""
    expected = references.digest_of(TRAIN_HUGGINGFACE, *arguments, workers=WORKERS)
    fault = Fault(point="batch", step=7, rank=1)
    result = jobs.run(TRAIN_HUGGINGFACE, *arguments, workers=WORKERS, faults=[fault])
    result.assert_exact(expected, faults=1, steps=steps)
    end = the_end(result, workers=WORKERS - 1)
    assert end["global_step"] == end["seen"] == (steps or end["global_step"])
