"""Jobs whose workers share one GPU: exchanged by NCCL, killed, stopped, replaced, and bit for bit the same at the end."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import TRAIN, Job, Jobs, References, describe, wait_for

from craft.testing import Fault

WORKERS = 3
REPLACED = {"CRAFT_MAX_RESTARTS": "20"}
LIMIT_S = 120.0
BROKEN = Path(__file__).parent / "scripts" / "broken.py"
LLAMA = Path(__file__).parents[2] / "examples" / "llama" / "train_craft.py"


def assert_by(run_dir: Path, kind: str) -> None:
    """Every worker says that gradients travel by this kind of group."""
    logs = [log.read_text(errors="replace") for log in run_dir.glob("workers/*/log")]
    assert logs and all(f"gradients travel by {kind}" in log for log in logs), logs


def test_workers_on_one_gpu_end_with_the_bits_of_one_worker_P1(jobs: Jobs, references: References) -> None:
    result = jobs.run(workers=WORKERS, limit_s=LIMIT_S)
    result.assert_exact(references.digest(workers=1), faults=0)
    assert_by(result.run_dir, "NCCL")


def test_through_the_memory_of_the_host_the_bits_are_the_same_P1(jobs: Jobs, references: References) -> None:
    fault = Fault(point="result_sent", step=4, rank=1)
    result = jobs.run(workers=WORKERS, options=["--group", "gloo"], faults=[fault], limit_s=LIMIT_S)
    result.assert_exact(references.digest(workers=1), faults=1)
    assert_by(result.run_dir, "Gloo")


@pytest.mark.parametrize(
    "point",
    ["opened", "batch", "flushed", "blocks_sent", "result_sent", "before_acknowledge", "acknowledging", "committed"],
)
def test_workers_that_die_at_any_point_do_not_change_a_bit_P1_P2_P3(
    jobs: Jobs, references: References, point: str
) -> None:
    """First the leader, then another one; the last one goes on alone."""
    steps = (0, 6) if point == "opened" else (3, 6)
    faults = [Fault(point=point, step=step, rank=rank) for step, rank in zip(steps, (0, 1), strict=True)]
    if point == "opened":
        faults = faults[:1]
    result = jobs.run(workers=WORKERS, faults=faults, limit_s=LIMIT_S)
    assert len(result.struck) == len(faults), describe(result)
    result.assert_exact(references.digest(workers=1), faults=len(faults), steps=10)


def replaced(job: Job) -> None:
    """Somebody has come in the place of the lost one, and has committed."""
    job.wait_for_committing(WORKERS + 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_worker_is_replaced_from_the_state_on_the_devices_of_the_others_P1(
    jobs: Jobs, references: References, tmp_path: Path, number: signal.Signals
) -> None:
    arguments = ("--steps", "150", "--width", "512")
    gate = tmp_path / "gate"
    job = jobs.start(TRAIN, *arguments, "--slow-until", str(gate), workers=WORKERS, environment=REPLACED)
    job.reach_step(10)
    os.kill(job.pids()["w1"], number)
    replaced(job)
    gate.touch()
    job.wait(LIMIT_S).assert_exact(references.digest(*arguments, workers=1), faults=1, steps=150)


def test_a_job_goes_on_from_a_checkpoint_of_device_memory_P1_P7(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    store = ["--checkpoints", str(tmp_path / "store"), "--checkpoint-every", "5 steps"]
    first = jobs.start(TRAIN, "--steps", "100", workers=WORKERS, options=store)
    first.reach_step(30)
    first.end()
    result = jobs.run(TRAIN, "--steps", "100", workers=2, options=[*store, "--resume"], limit_s=LIMIT_S)
    assert result.exit_code == 0, describe(result)
    assert result.digest == references.digest("--steps", "100", workers=1)


def test_a_llama_in_bfloat16_loses_a_worker_and_not_a_bit_P1(jobs: Jobs, references: References) -> None:
    arguments = ("--size", "small", "--steps", "60", "--length", "256")
    job = jobs.start(LLAMA, *arguments, workers=WORKERS, environment={"CRAFT_BUCKET_MB": "10"})
    job.reach_step(10)
    job.kill("w1")
    whole = references.digest_of(LLAMA, *arguments, workers=1)
    job.wait(LIMIT_S).assert_exact(whole, faults=1, steps=60)


@pytest.mark.parametrize("kind", ["assert", "illegal"])
def test_an_error_that_leaves_the_device_unusable_costs_that_worker_and_not_the_job_P1(
    jobs: Jobs, references: References, tmp_path: Path, kind: str
) -> None:
    """Nothing on the device can be used by the process after such an error: it ends, and another one takes its place."""
    once = tmp_path / "once"
    arguments = (kind, str(once), str(TRAIN), "--steps", "40")
    result = jobs.run(BROKEN, *arguments, workers=WORKERS, environment=REPLACED, limit_s=LIMIT_S)
    assert once.exists(), describe(result)
    result.assert_exact(references.digest("--steps", "40", workers=1), faults=1, steps=40)
    (failed,) = result.events("WorkerFailed")
    assert "CUDA" in failed["error"] and kind in failed["error"], failed["error"]


def test_a_worker_whose_abort_does_not_return_ends_and_leaves_its_place_to_another_P1(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    """When another one is lost, all abort; one of them never gets to the end of that."""
    once, gate = tmp_path / "once", tmp_path / "gate"
    arguments = ("hangs", str(once), str(TRAIN), "--steps", "400", "--slow-until", str(gate))
    job = jobs.start(BROKEN, *arguments, workers=WORKERS, environment=REPLACED)
    job.reach_step(5)
    job.kill("w2")
    whole = references.digest("--steps", "400", workers=1)
    wait_for(lambda: "w1" in ends(job.journal()), "the one that hangs has ended", LIMIT_S)
    gate.touch()
    result = job.wait(LIMIT_S)
    result.assert_exact(whole, faults=2, steps=400)
    assert once.exists() and "w1" in ends(result.run.journal), describe(result)


def ends(journal: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Of the workers that were lost."""
    return {line["worker_id"]: line["reason"] for line in journal if line.get("event") == "WorkerLost"}
