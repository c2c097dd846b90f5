"""``step.carry``: state per microbatch lane follows the job, through losses, joins and restarts (P1)."""

from __future__ import annotations

from pathlib import Path

import pytest

from craft.testing import Fault

from .jobs import Jobs, References, describe

BPTT = Path(__file__).parent / "scripts" / "bptt.py"
STEPS = 24


@pytest.fixture(scope="module")
def undisturbed(references: References) -> str:
    return references.digest_of(BPTT, workers=1)


def test_what_lanes_carry_survives_the_loss_of_those_who_computed_it_P1(
    jobs: Jobs, undisturbed: str, tmp_path: Path
) -> None:
    """In the same step, before it counts, and right after it does; others come in the places of the lost."""
    all_are_there = tmp_path / "all_are_there"
    faults = [
        Fault(point="computed", step=3, rank=2),
        Fault(point="before_acknowledge", step=6, rank=1, after_file="struck/0"),
        Fault(point="committed", step=9, rank=0, after_file="struck/1"),
    ]
    job = jobs.start(
        BPTT,
        *("--slow-until", str(all_are_there)),
        workers=3,
        faults=faults,
        environment={"CRAFT_MAX_RESTARTS": "3"},
    )
    job.wait_for_committing(6)
    all_are_there.touch()
    job.wait().assert_exact(undisturbed, faults=3, steps=STEPS)


def test_a_job_goes_on_from_a_checkpoint_with_what_its_lanes_carry_P1_P7(
    jobs: Jobs, undisturbed: str, tmp_path: Path
) -> None:
    """With another number of workers."""
    options = ("--checkpoints", str(tmp_path / "store"), "--checkpoint-every", "1 steps", "--resume")
    job = jobs.start(BPTT, "--slow-until", str(tmp_path / "never"), options=options, workers=3)
    job.reach_step(5)
    job.process.terminate()
    result = job.wait()
    assert result.exit_code == 75, describe(result)
    result = jobs.run(BPTT, options=options, workers=2)
    assert result.exit_code == 0 and result.digest == undisturbed, describe(result)


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(
    "fault",
    [
        Fault(point="batch", step=5, rank=1, occurrence=2),
        Fault(point="result_sent", step=5, rank=0),
        Fault(point="acknowledging", step=5, rank=1),
        Fault(point="committed", step=0, rank=0),
    ],
    ids=lambda fault: f"{fault.point}-{fault.step}",
)
def test_lanes_have_the_same_bits_wherever_a_step_is_cut_short_P1(
    jobs: Jobs, undisturbed: str, workers: int, fault: Fault
) -> None:
    jobs.run(BPTT, workers=workers, faults=[fault]).assert_exact(undisturbed, faults=1, steps=STEPS)
