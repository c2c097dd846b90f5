"""The examples for GPUs. They train on the CPU as well: the same scripts, the same promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from craft.testing.history import check

from .jobs import LIMIT_S, Jobs, References, describe

EXAMPLES = Path(__file__).parents[2] / "examples" / "llama"
LLAMA = EXAMPLES / "train_craft.py"
SHARDED_PLAIN, SHARDED = EXAMPLES / "train_fsdp.py", EXAMPLES / "train_craft_fsdp.py"


@pytest.mark.long
def test_a_llama_in_bfloat16_loses_a_worker_and_not_a_bit_P1(jobs: Jobs, references: References) -> None:
    arguments = ("--steps", "10", "--length", "16")
    job = jobs.start(LLAMA, *arguments, workers=3)
    job.reach_step(2)
    job.kill("w1")
    job.wait().assert_exact(references.digest_of(LLAMA, *arguments, workers=1), faults=1, steps=10)


def test_a_sharded_llama_runs_with_torchrun(tmp_path: Path) -> None:
    """What a person begins with."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(SHARDED_PLAIN), "--steps", "10", "--length", "16"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "step 10 loss" in done.stdout


def test_a_sharded_llama_loses_a_worker_and_not_a_bit_P1(jobs: Jobs) -> None:
    arguments, options = ("--steps", "40", "--length", "16"), ["--workers-per-replica", "2"]
    alone = jobs.run(SHARDED, *arguments, workers=2, options=options)
    assert alone.exit_code == 0, describe(alone)

    job = jobs.start(SHARDED, *arguments, workers=4, options=options)
    job.reach_step(4)
    job.kill("w1")
    result = job.wait()

    assert result.exit_code == 0, describe(result)
    assert check(result.run_dir, alone.run_dir).violations == (), describe(result)
    assert (
        "4 microbatches over 2 replicas: after the loss of a worker, a step computes 2.00 times as long"
        in result.output
    )
    logs = "".join(path.read_text() for path in result.run_dir.glob("workers/*/log"))
    assert logs.count("step 40 loss") == 1, logs
