"""``Trainer(strategy="craft")`` whose workers train on a GPU: lost and replaced, with the bits of the undisturbed fit."""

from __future__ import annotations

from pathlib import Path

from tests.integration.jobs import Jobs, References, describe
from tests.integration.test_lightning import TRAIN_LIGHTNING, ends

from craft.adapters.lightning.registration import imported

WORKERS = 3
LIMIT_S = 150.0
REPLACED = {"CRAFT_MAX_RESTARTS": "3"}


def test_a_fit_on_a_gpu_loses_a_worker_gets_another_and_keeps_every_bit_P1(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    """The undisturbed one is left to find the GPU by itself."""
    given = ("--package", imported(), "--epochs", "3", "--accumulate", "1", "--accelerator")
    gate = tmp_path / "gate"
    slow = ("--slow-until", str(gate), "--slow-s", "0.6")
    job = jobs.start(TRAIN_LIGHTNING, *given, "gpu", *slow, workers=WORKERS, environment=REPLACED)
    job.reach_step(4)
    job.kill("w1")
    # Beside it, while another worker comes.
    undisturbed = references.digest_of(TRAIN_LIGHTNING, *given, "auto", workers=WORKERS)
    job.wait_for_committing(WORKERS + 1)
    gate.touch()
    result = job.wait(LIMIT_S)
    result.assert_exact(undisturbed, faults=1)
    logs = [log.read_text() for log in result.run_dir.glob("workers/*/log")]
    assert all("trains on cuda:0; gradients travel by NCCL" in log for log in logs), describe(result)
    assert len({str(each) for each in ends(result).values()}) == 1, describe(result)
