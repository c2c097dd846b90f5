"""``step.gather``: losses over the whole global batch, through losses of workers and joins (P1)."""

from __future__ import annotations

from pathlib import Path

import pytest

from craft.testing import Fault

from .jobs import Jobs, References, describe

CONTRASTIVE = Path(__file__).parent / "scripts" / "contrastive.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "contrastive" / "train_craft.py"
STEPS = 16


@pytest.fixture(scope="module")
def undisturbed(references: References) -> str:
    return references.digest_of(CONTRASTIVE, workers=1)


def test_a_whole_batch_loss_has_the_same_bits_whichever_pass_a_loss_falls_into_P1(
    jobs: Jobs, undisturbed: str, tmp_path: Path
) -> None:
    """Into the first pass, into the exchange of rows, and into the second pass; others come in the places of the lost."""
    all_are_there = tmp_path / "all_are_there"
    faults = [
        Fault(point="computed", step=2, rank=1, occurrence=1),
        Fault(point="gathering", step=5, rank=0, after_file="struck/0"),
        Fault(point="computed", step=8, rank=1, occurrence=4, after_file="struck/1"),
    ]
    job = jobs.start(
        CONTRASTIVE,
        *("--slow-until", str(all_are_there)),
        workers=3,
        faults=faults,
        environment={"CRAFT_MAX_RESTARTS": "3"},
    )
    job.wait_for_committing(6)
    all_are_there.touch()
    job.wait().assert_exact(undisturbed, faults=3, steps=STEPS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "fault"),
    [
        (2, Fault(point="gathering", step=0, rank=1)),
        (2, Fault(point="before_acknowledge", step=4, rank=0)),
        (3, Fault(point="result_sent", step=4, rank=2)),
        (8, Fault(point="computed", step=4, rank=0, occurrence=2)),
    ],
    ids=lambda value: value.point if isinstance(value, Fault) else str(value),
)
def test_rows_of_a_lost_worker_are_given_by_another_one_P1(
    jobs: Jobs, undisturbed: str, workers: int, fault: Fault
) -> None:
    """Also where there are more workers than microbatches."""
    jobs.run(CONTRASTIVE, workers=workers, faults=[fault]).assert_exact(undisturbed, faults=1, steps=STEPS)


@pytest.mark.long
def test_the_example_of_a_whole_batch_loss_runs(jobs: Jobs) -> None:
    result = jobs.run(EXAMPLE, workers=2, limit_s=150)
    assert result.exit_code == 0, describe(result)
    assert "step 100 loss" in (result.run_dir / "workers" / "w0" / "log").read_text()
