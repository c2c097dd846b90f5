"""Sharded replicas whose workers share one GPU: NCCL inside the replica and between twins, kills, the same bits."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.integration.jobs import SCRIPTS, Job, Jobs, Result, describe

from craft.testing import Fault
from craft.testing.history import check

TRAIN = SCRIPTS / "train_sharded.py"
REPLACED = {"CRAFT_MAX_RESTARTS": "20"}
LIMIT_S = 150.0
SHAPES = {"fsdp": 2, "tp": 2, "both": 4}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    """Directories of undisturbed jobs of one replica, by kind and steps."""
    return {}


def reference(jobs: Jobs, alone: dict[tuple[str, int], Path], kind: str, steps: int) -> Path:
    if (kind, steps) not in alone:
        result = run(jobs, kind, steps, workers=SHAPES[kind])
        assert result.exit_code == 0, describe(result)
        alone[kind, steps] = result.run_dir
    return alone[kind, steps]


def options(kind: str) -> list[str]:
    return ["--workers-per-replica", str(SHAPES[kind])]


def run(jobs: Jobs, kind: str, steps: int, workers: int, faults: tuple[Fault, ...] = ()) -> Result:
    return jobs.run(
        TRAIN, kind, "--steps", str(steps), workers=workers, options=options(kind), faults=list(faults), limit_s=LIMIT_S
    )


def assert_exact(result: Result, undisturbed: Path) -> None:
    assert result.exit_code == 0, describe(result)
    assert check(result.run_dir, undisturbed).violations == (), describe(result)
    logs = [log.read_text(errors="replace") for log in result.run_dir.glob("workers/*/log")]
    assert logs and all("gradients travel by NCCL" in log for log in logs if "trains on" in log), logs


@pytest.mark.parametrize("kind", ["fsdp", "tp", "both"])
def test_two_replicas_on_a_gpu_have_the_bits_of_one_P1(
    jobs: Jobs, alone: dict[tuple[str, int], Path], kind: str
) -> None:
    assert_exact(run(jobs, kind, 10, workers=2 * SHAPES[kind]), reference(jobs, alone, kind, 10))


@pytest.mark.parametrize(
    ("point", "rank"),
    [("forward", 1), ("beat", 2), ("blocks_sent", 1), ("acknowledging", 3), ("before_clip", 0), ("after_clip", 2)],
)
def test_a_worker_lost_anywhere_changes_no_bit_P1_P2_P3(
    jobs: Jobs, alone: dict[tuple[str, int], Path], point: str, rank: int
) -> None:
    result = run(jobs, "fsdp", 10, workers=4, faults=(Fault(point=point, step=4, rank=rank),))
    assert len(result.struck) == 1, describe(result)
    assert_exact(result, reference(jobs, alone, "fsdp", 10))


@pytest.mark.parametrize(
    ("kind", "number"),
    [("fsdp", signal.SIGKILL), ("fsdp", signal.SIGSTOP), ("tp", signal.SIGKILL), ("both", signal.SIGKILL)],
)
def test_one_process_is_replaced_and_the_others_stay_P1(
    jobs: Jobs, alone: dict[tuple[str, int], Path], kind: str, number: signal.Signals
) -> None:
    workers = 2 * SHAPES[kind]
    job: Job = jobs.start(
        TRAIN, kind, "--steps", "80", "--slow", "0.02", workers=workers, options=options(kind), environment=REPLACED
    )
    job.reach_step(8)
    before = job.pids()
    os.kill(before["w1"], number)
    job.wait_for_committing(workers + 1)
    after = job.pids()
    result = job.wait(LIMIT_S)
    assert all(after[worker] == pid for worker, pid in before.items() if worker != "w1")
    assert_exact(result, reference(jobs, alone, kind, 80))
