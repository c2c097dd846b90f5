"""``CraftTrainer`` whose workers train on a GPU: lost, replaced and preempted, with the bits of one that was never disturbed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.jobs import Jobs, References, Result, describe
from tests.integration.test_huggingface import SAME_AS_TRAINER, STEPS, TRAIN_HUGGINGFACE, the_end

WORKERS = 3
LIMIT_S = 150.0
REPLACED = {"CRAFT_MAX_RESTARTS": "3"}
LLAMA = ("--gpu", "--model", "llama", "--bf16")
SCALED = ("--gpu", "--fp16")


@pytest.fixture(scope="module", autouse=True)
def imported_once() -> Iterator[None]:
    """Also: what the fork server imports must leave the GPU to the workers."""
    modules = ("trainer", "models.gpt2.modeling_gpt2", "models.llama.modeling_llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CRAFT_PRELOAD", ", ".join(f"transformers.{each}" for each in modules))
        yield


def alone(references: References, *given: str) -> str:
    """What one worker ends with that computes everything, and that nobody disturbs."""
    return references.digest_of(TRAIN_HUGGINGFACE, *given, "--accumulate", "6", workers=1)


def lose_one(jobs: Jobs, references: References, folder: Path, *given: str) -> Result:
    """Three workers, one of them lost and replaced: asserts that they end with the bits of one worker alone."""
    gate = folder / "gate"
    slow = ("--slow-until", str(gate), "--slow-s", "0.3")
    job = jobs.start(TRAIN_HUGGINGFACE, *given, *slow, workers=WORKERS, environment=REPLACED)
    job.reach_step(4)
    job.kill("w1")
    # Beside it, while another worker comes.
    expected = alone(references, *given)
    job.wait_for_committing(WORKERS + 1)
    gate.touch()
    result = job.wait(LIMIT_S)
    result.assert_exact(expected, faults=1, steps=STEPS)
    assert_trained_on(result, "cuda:0; gradients travel by NCCL")
    return result


def assert_trained_on(result: Result, device: str) -> None:
    logs = [log.read_text() for log in result.run_dir.glob("workers/*/log")]
    assert logs and all(f"trains on {device}" in log for log in logs), describe(result)


def test_a_llama_on_a_gpu_loses_a_worker_gets_another_and_keeps_every_bit_P1(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    result = lose_one(jobs, references, tmp_path, *LLAMA)
    end = the_end(result)
    assert (end["global_step"], end["epoch"], end["seen"]) == (STEPS, 2, STEPS)
    assert end["logged_at"] == list(range(2, STEPS + 1, 2)) and end["eval_loss"] < end["losses"][0]


def test_a_gradient_scaler_has_its_scale_on_whoever_joins_and_in_the_trainers_checkpoints_P1(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    """Then another job goes on from one that the first one wrote, before its end."""
    result = lose_one(jobs, references, tmp_path, *SCALED)
    before = the_end(result)
    kept = {int(each.name.split("-")[1]): each for each in (result.run_dir.parent / "out").glob("checkpoint-*")}
    step = min(kept)
    assert {"scaler.pt", "optimizer.pt", "rng_state.pth"} <= {each.name for each in kept[step].iterdir()}
    result = jobs.run(TRAIN_HUGGINGFACE, *SCALED, "--begin-from", str(kept[step]), workers=WORKERS, limit_s=LIMIT_S)
    assert result.exit_code == 0, describe(result)
    after = the_end(result)
    assert after["global_step"] == STEPS and after["seen"] == STEPS - step, describe(result)
    assert after["eval_loss"] == pytest.approx(before["eval_loss"], abs=0.1), describe(result)


def test_a_trainer_on_a_gpu_that_was_preempted_goes_on_from_crafts_checkpoint_with_the_same_bits_P1_P7(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    options = ("--checkpoints", str(tmp_path / "store"), "--resume")
    slow = ("--slow-until", str(tmp_path / "never"), "--slow-s", "0.1")
    job = jobs.start(TRAIN_HUGGINGFACE, *LLAMA, *slow, options=options, workers=WORKERS)
    job.reach_step(9)
    job.process.terminate()
    result = job.wait(LIMIT_S)
    assert result.exit_code == 75, describe(result)
    result = jobs.run(TRAIN_HUGGINGFACE, *LLAMA, options=options, workers=WORKERS, limit_s=LIMIT_S)
    assert result.digest == alone(references, *LLAMA), describe(result)
    assert_trained_on(result, "cuda:0")
    assert the_end(result)["logged_at"] == list(range(2, STEPS + 1, 2))


def test_the_trainers_own_settings_for_equal_bits_give_them_P1(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    lose_one(jobs, references, tmp_path, "--gpu", "--full-determinism")


def test_a_script_that_wants_the_cpu_stays_there(jobs: Jobs) -> None:
    result = jobs.run(TRAIN_HUGGINGFACE, "--steps", "3", workers=2)
    assert result.exit_code == 0, describe(result)
    assert_trained_on(result, "cpu; gradients travel by Gloo")


def test_gradients_and_losses_on_a_gpu_are_those_of_the_trainer() -> None:
    """Up to the order in which numbers are added."""
    command = [sys.executable, str(SAME_AS_TRAINER), "--gpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["weights"] < 1e-6 and found["losses"] < 1e-5 and found["moved"] > 1e-3, found
