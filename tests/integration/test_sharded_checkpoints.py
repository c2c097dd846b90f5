"""Checkpoints of jobs whose model is spread over the workers of a replica: saved per position, used at any mesh (P1, P7)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from craft.cli.main import main
from craft.testing import Fault

from .jobs import Job, Jobs, Result, describe, wait_for
from .stores import kill_all, manifests
from .test_sharded import TRAIN_SHARDED, assert_exact, options, reference

__all__ = ["reference"]

STEPS = ("--steps", "20")
SLOW = ("--slow", "0.05")
REPLACE = {"CRAFT_MAX_RESTARTS": "20"}


def into(store: Path, size: int, *more: str) -> list[str]:
    return [*options(size), "--checkpoints", str(store), "--checkpoint-every", "5 steps", *more]


def start(jobs: Jobs, store: Path, *arguments: str, size: int = 2, kind: str = "fsdp") -> Job:
    return jobs.start(TRAIN_SHARDED, kind, *STEPS, *SLOW, *arguments, workers=2 * size, options=into(store, size))


def resumed_from(result: Result) -> int:
    return int(result.events("CheckpointRestored")[0]["step"])


def damage(store: Path, manifest: Path) -> str:
    """Flip a bit of what only the last position of a checkpoint has; return the name of that file."""
    name: str = json.loads(manifest.read_text())["chunks"][-1][0]
    (chunk,) = store.glob(f"chunks/*/{name}")
    data = bytearray(chunk.read_bytes())
    data[100] ^= 1
    chunk.write_bytes(data)
    return name


def test_a_job_of_which_nothing_is_left_goes_on_from_the_newest_whole_checkpoint_P1_P7(
    jobs: Jobs, reference: Path, tmp_path: Path
) -> None:
    """Also with another number of replicas, and where the newest is damaged at one position."""
    store = tmp_path / "store"
    job = start(jobs, store)
    wait_for(lambda: len(manifests(store)) >= 2, "two checkpoints are complete")
    kill_all(job)
    before, newest = manifests(store)[-2:]
    damaged = damage(store, newest)
    result = jobs.run(TRAIN_SHARDED, "fsdp", *STEPS, workers=2, options=into(store, 2, "--resume", "auto"))

    assert_exact(result, reference)
    (rejected,) = result.events("CheckpointRejected")
    assert damaged in rejected["reason"] and rejected["name"] == newest.stem
    assert resumed_from(result) == int(before.stem.split("-")[1])


MESHES = [
    pytest.param("both", 4, 4),
    pytest.param("fsdp", 4, 4, marks=pytest.mark.long),
    pytest.param("tp", 2, 4, marks=pytest.mark.long),
    pytest.param("fsdp", 1, 2, marks=pytest.mark.long),
    pytest.param("plain", 1, 1),
]


@pytest.mark.parametrize(("kind", "size", "workers"), MESHES)
def test_a_checkpoint_is_exported_as_one_model_and_restored_at_another_mesh(
    jobs: Jobs, tmp_path: Path, kind: str, size: int, workers: int
) -> None:
    store, out = tmp_path / "store", tmp_path / "model.pt"
    assert jobs.run(TRAIN_SHARDED, "fsdp", "--steps", "6", workers=2, options=into(store, 2)).exit_code == 0
    said = CliRunner().invoke(main, ["checkpoints", "verify", str(store)])
    assert said.exit_code == 0 and "as they were written" in said.output, said.output
    said = CliRunner().invoke(main, ["checkpoints", "export", str(store), "5", str(out), "--format", "torch"])
    assert said.exit_code == 0, said.output
    found = torch.load(out)
    assert tuple(found["model"]["3.weight"].shape) == (10, 32)
    assert tuple(found["registered"]["optimizer"]["state"][2]["exp_avg"].shape) == (128, 32)

    again = into(store, size, "--resume", "5")
    result = jobs.run(TRAIN_SHARDED, kind, "--steps", "8", workers=workers, options=again)
    assert result.exit_code == 0, describe(result)
    assert resumed_from(result) == 5
    assert any("not with the same bits" in each["text"] for each in result.events("ScriptWarned"))
    # And back, with what the other mesh saved.
    options_back = into(store, 2, "--resume", "8")
    result = jobs.run(TRAIN_SHARDED, "fsdp", "--steps", "9", workers=2, options=options_back)
    assert result.exit_code == 0, describe(result)
    assert resumed_from(result) == 8


def test_a_checkpoint_of_another_model_is_refused_by_name(jobs: Jobs, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert jobs.run(TRAIN_SHARDED, "fsdp", "--steps", "2", workers=2, options=into(store, 2)).exit_code == 0
    again = into(store, 2, "--resume", "auto")
    result = jobs.run(TRAIN_SHARDED, "fsdp", "--steps", "4", "--classes", "12", workers=2, options=again)

    assert result.exit_code not in (0, 75)
    assert "first in model.3.weight" in result.output + result.errors, describe(result)


def test_a_worker_that_is_lost_while_a_checkpoint_is_written_changes_nothing_P1_P7(
    jobs: Jobs, reference: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    fault = Fault(point="saved", step=10, rank=3)
    result = jobs.run(
        TRAIN_SHARDED, "fsdp", *STEPS, "--tag-at", "12", options=into(store, 2), faults=[fault], environment=REPLACE
    )

    assert_exact(result, reference)
    assert result.struck
    # Its share was copied and is not written: the others take another one.
    assert [each["step"] for each in result.events("CheckpointAbandoned")] == [10]
    steps = {each["step"]: each["tag"] for each in result.events("CheckpointWritten")}
    assert steps[13] == "best" and 20 in steps and len(steps) >= 4


def test_a_preempted_job_goes_on_with_the_same_bits_P1_P7(jobs: Jobs, reference: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    job = start(jobs, store)
    job.reach_step(3)
    job.process.terminate()
    result = job.wait()
    assert result.exit_code == 75, describe(result)
    result = jobs.run(TRAIN_SHARDED, "fsdp", *STEPS, workers=4, options=into(store, 2, "--resume", "auto"))

    assert_exact(result, reference)
    assert resumed_from(result) >= 3


def test_the_job_begins_again_from_a_checkpoint_if_all_twins_of_a_position_are_lost_P1_P7(
    jobs: Jobs, reference: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    job = jobs.start(TRAIN_SHARDED, "fsdp", *STEPS, *SLOW, options=into(store, 2), environment=REPLACE)
    wait_for(lambda: any(line.get("event") == "CheckpointWritten" for line in job.journal()), "a checkpoint is known")
    job.kill("w1", "w3")
    result = job.wait()

    assert_exact(result, reference)
    assert resumed_from(result) >= 5


def test_a_tensor_parallel_job_that_would_begin_again_says_to_start_it_with_resume(jobs: Jobs, tmp_path: Path) -> None:
    """Weights are scattered while the model is built, and no worker is left that has what the others would receive."""
    store = tmp_path / "store"
    job = jobs.start(TRAIN_SHARDED, "tp", *STEPS, *SLOW, options=into(store, 2), environment=REPLACE)
    wait_for(lambda: any(line.get("event") == "CheckpointWritten" for line in job.journal()), "a checkpoint is known")
    job.kill("w1", "w3")
    result = job.wait()

    assert result.exit_code not in (0, None), describe(result)
    assert "start the job with --resume" in result.errors + result.output, describe(result)


def test_a_job_that_diverges_goes_back_to_its_checkpoint(jobs: Jobs, tmp_path: Path) -> None:
    more = ("--on-divergence", "rollback")
    result = jobs.run(
        TRAIN_SHARDED, "fsdp", *STEPS, "--nan-at", "7", options=into(tmp_path / "store", 2, *more), environment=REPLACE
    )

    assert result.exit_code == 0, describe(result)
    (event,) = {(each["step"], each["left_at"], each["branch"]) for each in result.events("RolledBack")}
    assert event == (5, 8, 1)
    assert {branch for each in result.run.commits.values() for branch in {commit.branch for commit in each}} == {0, 1}


@pytest.mark.long
@pytest.mark.parametrize("reference", [("both", 4, 20)], indirect=True)
def test_fsdp_with_tensor_parallel_goes_on_with_the_same_bits_P1_P7(
    jobs: Jobs, reference: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    job = start(jobs, store, size=4, kind="both")
    wait_for(lambda: len(manifests(store)) >= 1, "a checkpoint is complete")
    kill_all(job)
    copy = tmp_path / "copy"
    shutil.copytree(store, copy)
    for place, workers in ((store, 8), (copy, 4)):
        result = jobs.run(TRAIN_SHARDED, "both", *STEPS, workers=workers, options=into(place, 4, "--resume", "auto"))
        assert_exact(result, reference)
