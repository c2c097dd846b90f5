"""The example for GPUs. It trains on the CPU as well: the same script, the same promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from .jobs import Jobs, References

LLAMA = Path(__file__).parents[2] / "examples" / "llama" / "train_craft.py"


@pytest.mark.long
def test_a_llama_in_bfloat16_loses_a_worker_and_not_a_bit_P1(jobs: Jobs, references: References) -> None:
    arguments = ("--steps", "10", "--length", "16")
    job = jobs.start(LLAMA, *arguments, workers=3)
    job.reach_step(2)
    job.kill("w1")
    job.wait().assert_exact(references.digest_of(LLAMA, *arguments, workers=1), faults=1, steps=10)
