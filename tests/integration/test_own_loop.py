"""``job.attempts``: a loop that CRAFT does not own, through losses, joins and restarts (P1 to P3)."""

from __future__ import annotations

from pathlib import Path

import pytest

from craft.testing import Fault

from .jobs import Jobs, References, describe, wait_for

GAN = Path(__file__).parent / "scripts" / "gan.py"
DCGAN = GAN.with_name("dcgan.py")
SUMMED = GAN.with_name("summed.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop" / "train_craft.py"
STEPS = 16
WITH_OTHERS_IN_THEIR_PLACE = {"CRAFT_MAX_RESTARTS": "3"}


@pytest.fixture(scope="module")
def undisturbed(references: References) -> str:
    return references.digest_of(GAN, workers=3)


def test_a_body_that_is_cut_short_anywhere_is_tried_again_with_the_same_bits_P1_P2_P3(
    jobs: Jobs, undisturbed: str, tmp_path: Path
) -> None:
    """In one network's microbatches, between its update and the other's, after both; others come in the places of the lost."""
    all_are_there = tmp_path / "all_are_there"
    faults = [
        Fault(point="discriminator", step=2, rank=1),
        Fault(point="between", step=4, rank=0, after_file="struck/0"),
        Fault(point="generator", step=8, rank=0, after_file="struck/1"),
    ]
    job = jobs.start(
        GAN,
        "--slow-until",
        str(all_are_there),
        workers=3,
        faults=faults,
        environment=WITH_OTHERS_IN_THEIR_PLACE,
    )
    job.wait_for_committing(6)
    all_are_there.touch()
    result = job.wait()
    result.assert_exact(undisturbed, faults=3, steps=STEPS)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(point="updated", step=5, rank=0),
        Fault(point="reduced", step=5, rank=1, occurrence=2),
        Fault(point="acknowledging", step=5, rank=1, occurrence=1),
        Fault(point="acknowledging", step=5, rank=1, occurrence=3),
        Fault(point="before_acknowledge", step=5, rank=2, occurrence=3),
        Fault(point="committed", step=5, rank=0),
    ],
    ids=lambda fault: f"{fault.point}-{fault.occurrence}",
)
def test_a_step_whose_end_is_cut_short_is_committed_by_all_or_taken_back_by_all_P1_P3(
    jobs: Jobs, undisturbed: str, fault: Fault
) -> None:
    jobs.run(GAN, workers=3, faults=[fault]).assert_exact(undisturbed, faults=1, steps=STEPS)


def test_the_number_of_workers_does_not_show_in_the_bits_of_an_own_loop_P1(jobs: Jobs, undisturbed: str) -> None:
    result = jobs.run(GAN, workers=1)
    result.assert_exact(undisturbed, faults=0, steps=STEPS)


def test_a_graph_is_run_backward_in_a_later_part_of_the_body_and_a_taken_back_attempt_leaves_nothing_P1(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    """Batch norm's buffers are put back in between. What the loss cost is told: the whole attempt."""
    expected = references.digest_of(DCGAN, workers=1)
    all_are_there = tmp_path / "all_are_there"
    faults = [Fault(point="between", step=4, rank=1)]
    job = jobs.start(
        DCGAN,
        *("--slow-until", str(all_are_there)),
        workers=3,
        faults=faults,
        environment=WITH_OTHERS_IN_THEIR_PLACE,
    )
    job.wait_for_committing(4)
    all_are_there.touch()
    result = job.wait()
    result.assert_exact(expected, faults=1, steps=14)
    (cost,) = result.events("Recovered")
    assert cost["step"] == 4 and cost["retried"] == [4] and cost["redone"] == [0, 1, 2, 3, 4, 5], cost


def test_a_body_may_call_all_workers_and_a_loop_may_be_left_by_a_break_P3(jobs: Jobs, tmp_path: Path) -> None:
    """The sums of whole numbers: exact, however many take part. One is lost between its calls and its update."""
    undisturbed = jobs.run(SUMMED, workers=1)
    assert undisturbed.exit_code == 0 and undisturbed.digest is not None, describe(undisturbed)
    all_are_there = tmp_path / "all_are_there"
    faults = [Fault(point="after_calls", step=3, rank=1)]
    job = jobs.start(
        SUMMED, "--slow-until", str(all_are_there), workers=2, faults=faults, environment=WITH_OTHERS_IN_THEIR_PLACE
    )

    # One that still catches up when the others break off counts as one that left.
    def keeps_pace() -> bool:
        logs = (job.run_dir / "workers").glob("*/log")
        return any("keeps pace with the others" in log.read_text() for log in logs)

    wait_for(keeps_pace, "another one keeps pace")
    all_are_there.touch()
    job.wait().assert_exact(undisturbed.digest, faults=1, steps=12)


@pytest.mark.long
@pytest.mark.parametrize("point", ["discriminator", "between", "updated"])
def test_a_job_that_waits_for_others_in_the_place_of_the_lost_has_the_same_bits_P1(
    jobs: Jobs, undisturbed: str, point: str
) -> None:
    result = jobs.run(
        GAN,
        workers=3,
        faults=[Fault(point=point, step=5, rank=1)],
        options=("--on-loss", "wait"),
        environment=WITH_OTHERS_IN_THEIR_PLACE,
    )
    result.assert_exact(undisturbed, faults=1, steps=STEPS)


@pytest.mark.long
def test_calls_between_attempts_give_the_same_to_everybody_also_after_losses_P1(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    expected = references.digest_of(GAN, "--evaluate", workers=3)
    all_are_there = tmp_path / "all_are_there"
    faults = [Fault(point="scored", step=4, rank=1), Fault(point="generator", step=8, rank=0)]
    arguments = ("--evaluate", "--slow-until", str(all_are_there))
    job = jobs.start(GAN, *arguments, workers=3, faults=faults, environment=WITH_OTHERS_IN_THEIR_PLACE)
    job.wait_for_committing(5)
    all_are_there.touch()
    job.wait().assert_exact(expected, faults=2, steps=STEPS)


@pytest.mark.parametrize(
    "options", [("--on-loss", "shrink"), ("--on-divergence", "skip"), ("--on-divergence", "lower-lr")], ids=" ".join
)
@pytest.mark.long
def test_what_an_own_loop_cannot_do_is_refused_at_start_with_the_reason_P8(
    jobs: Jobs, options: tuple[str, ...]
) -> None:
    result = jobs.run(GAN, workers=2, options=options)
    assert result.exit_code == 2, describe(result)
    assert f"{' '.join(options)} with job.attempts()" in result.errors + result.output, describe(result)


def test_an_own_loop_goes_on_from_a_checkpoint_with_the_same_bits_P1_P7(
    jobs: Jobs, undisturbed: str, tmp_path: Path
) -> None:
    options = ("--checkpoints", str(tmp_path / "store"), "--checkpoint-every", "1 steps", "--resume")
    job = jobs.start(GAN, "--slow-until", str(tmp_path / "never"), options=options, workers=2)
    job.reach_step(5)
    job.process.terminate()
    result = job.wait()
    assert result.exit_code == 75, describe(result)
    result = jobs.run(GAN, options=options, workers=3)
    assert result.exit_code == 0 and result.digest == undisturbed, describe(result)


def test_the_example_of_an_own_loop_runs(jobs: Jobs) -> None:
    result = jobs.run(EXAMPLE, workers=2, limit_s=150)
    assert result.exit_code == 0, describe(result)
    assert "step 100 discriminator" in (result.run_dir / "workers" / "w0" / "log").read_text()
