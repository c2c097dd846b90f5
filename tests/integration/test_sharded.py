"""Jobs whose model is spread over the workers of a replica: one process is lost and replaced, with the same bits (P1 to P3)."""

from __future__ import annotations

from pathlib import Path

import pytest

from craft.testing import Fault
from craft.testing.history import check

from .jobs import SCRIPTS, Job, Jobs, Result, describe

TRAIN_SHARDED = SCRIPTS / "train_sharded.py"
REPLACE = {"CRAFT_MAX_RESTARTS": "50"}


def options(size: int) -> list[str]:
    return ["--workers-per-replica", str(size)]


@pytest.fixture
def reference(jobs: Jobs, request: pytest.FixtureRequest) -> Path:
    """The directory of an undisturbed job of one replica."""
    kind, size, steps = getattr(request, "param", ("fsdp", 2, 20))
    result = jobs.run(TRAIN_SHARDED, kind, "--steps", str(steps), workers=size, options=options(size))
    assert result.exit_code == 0, describe(result)
    return result.run_dir


def assert_exact(result: Result, reference: Path) -> None:
    assert result.exit_code == 0, describe(result)
    assert check(result.run_dir, reference).violations == (), describe(result)


def lost(result: Result) -> set[str]:
    return {worker for line in result.run.journal if line.get("outcome") == "Fault" for worker in line["worker_ids"]}


@pytest.mark.parametrize("workers", [4, 6])
def test_any_number_of_replicas_gives_the_bits_of_one_P1(jobs: Jobs, reference: Path, workers: int) -> None:
    result = jobs.run(TRAIN_SHARDED, "fsdp", workers=workers, options=options(2))

    assert_exact(result, reference)


PLACES = [
    ("batch", 1, 1),
    ("forward", 2, 1),
    ("beat", 0, 2),
    ("blocks_sent", 1, 1),
    ("before_acknowledge", 2, 1),
    ("acknowledging", 1, 1),
    ("committed", 0, 1),
    ("before_clip", 1, 1),
    ("before_clip", 2, 1),
    ("after_clip", 3, 1),
]


@pytest.mark.parametrize(("point", "rank", "occurrence"), PLACES)
def test_a_worker_lost_anywhere_in_a_step_changes_no_bit_P1(
    jobs: Jobs, reference: Path, point: str, rank: int, occurrence: int
) -> None:
    fault = Fault(point=point, step=5, rank=rank, occurrence=occurrence if point == "beat" else 1)
    result = jobs.run(TRAIN_SHARDED, "fsdp", options=options(2), faults=[fault])

    assert_exact(result, reference)
    assert len(lost(result)) == 1, describe(result)


@pytest.mark.parametrize("reference", [("fsdp", 2, 60)], indirect=True)
def test_one_process_is_replaced_and_the_others_stay_P1(jobs: Jobs, reference: Path) -> None:
    job = jobs.start(TRAIN_SHARDED, "fsdp", "--steps", "60", "--slow", "0.03", options=options(2), environment=REPLACE)
    job.reach_step(5)
    before = job.pids()
    job.kill("w1")
    job.wait_for_committing(5)
    after = job.pids()
    result = job.wait()

    assert_exact(result, reference)
    assert all(after[worker] == pid for worker, pid in before.items() if worker != "w1")
    assert lost(result) == {"w1"}


@pytest.mark.parametrize(
    ("reference", "workers"), [(("tp", 2, 60), 4), (("both", 4, 40), 8)], indirect=["reference"], ids=["tp", "both"]
)
def test_tensor_parallel_replicas_lose_one_process_P1(jobs: Jobs, reference: Path, workers: int) -> None:
    kind, size, steps = ("tp", 2, 60) if workers == 4 else ("both", 4, 40)
    job = jobs.start(
        TRAIN_SHARDED, kind, "--steps", str(steps), "--slow", "0.02",
        workers=workers, options=options(size), environment=REPLACE,
    )  # fmt: skip
    job.reach_step(4)
    job.kill("w1")
    result = job.wait()

    assert_exact(result, reference)


@pytest.mark.parametrize("reference", [("fsdp", 2, 40)], indirect=True)
def test_two_losses_at_different_positions_leave_two_complete_replicas_P1(jobs: Jobs, reference: Path) -> None:
    """Without replacements, the rest of two replicas is one."""
    job = jobs.start(TRAIN_SHARDED, "fsdp", "--steps", "40", "--slow", "0.03", workers=6, options=options(2))
    job.reach_step(5)
    job.kill("w0")
    reach_more(job, 3)
    job.kill("w3")
    result = job.wait()

    assert_exact(result, reference)
    assert lost(result) == {"w0", "w3"}
    plans = set(result.run.commits["w4"][-1].plan.values())
    assert len(plans) == 2, describe(result)


def reach_more(job: Job, steps: int) -> None:
    job.reach_step(job.steps() + steps)


def test_a_script_without_a_mesh_is_told_what_to_do(jobs: Jobs, tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(
        "import torch, craft\n"
        "job = craft.join()\n"
        "model = job.replicate(torch.nn.Linear(2, 2))\n"
        "data = torch.utils.data.TensorDataset(torch.zeros(8, 2))\n"
        "list(job.steps(data, global_batch=4, microbatches=2, steps=1))\n"
    )
    result = jobs.run(script, workers=2, options=options(2))

    assert result.exit_code != 0
    assert "make the mesh of the model with job.mesh(shard=...)" in result.errors + result.output
