"""Scripts that end with exit code 0 before their end: no job is called finished that is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from .jobs import Jobs, describe

LEAVES = Path(__file__).parent / "scripts" / "leaves.py"
REPLACING = {"CRAFT_MAX_RESTARTS": "10"}


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("os._exit", "in_a_step"),
        ("sys.exit", "in_a_step"),
        pytest.param("os._exit", "between_steps", marks=pytest.mark.long),
        pytest.param("os._exit", "after_loop", marks=pytest.mark.long),
        pytest.param("os._exit", "before_join", marks=pytest.mark.long),
    ],
)
def test_a_job_all_of_whose_workers_leave_before_the_end_is_not_finished(jobs: Jobs, how: str, where: str) -> None:
    result = jobs.run(LEAVES, how, where, workers=2, environment=REPLACING)

    assert result.exit_code == 1, describe(result)
    assert "the script left before its end" in result.output, describe(result)


def test_a_script_that_ends_itself_between_two_steps_says_how_far_it_came(jobs: Jobs) -> None:
    result = jobs.run(LEAVES, "sys.exit", "between_steps", workers=2)

    assert result.exit_code == 0, describe(result)
    assert "finished after 8 of 20 steps: the script left its loop there" in result.output, describe(result)


@pytest.mark.long
def test_a_script_that_ends_itself_before_it_joins_says_that_nothing_was_trained(jobs: Jobs) -> None:
    result = jobs.run(LEAVES, "sys.exit", "before_join", workers=2)

    assert result.exit_code == 0, describe(result)
    assert "before it joined the others: nothing was trained" in result.output, describe(result)


@pytest.mark.parametrize("how", ["os._exit", pytest.param("sys.exit", marks=pytest.mark.long)])
def test_a_worker_that_leaves_with_exit_code_0_is_lost_and_replaced_P1(jobs: Jobs, how: str) -> None:
    result = jobs.run(LEAVES, how, "in_a_step", "w1", workers=3, environment=REPLACING)

    undisturbed = jobs.run(LEAVES, "never", "nowhere", workers=3)
    result.assert_exact(undisturbed.digest, faults=1, steps=20)
    assert [line["worker_id"] for line in result.events("WorkerFailed")] == ["w1"]


def test_a_worker_that_is_stopped_after_its_script_has_ended_does_not_hold_the_job_up_P1(jobs: Jobs) -> None:
    result = jobs.run(LEAVES, "stops", "at_exit", "w1", workers=2)

    undisturbed = jobs.run(LEAVES, "never", "nowhere", workers=2)
    assert (result.exit_code, result.digest) == (0, undisturbed.digest), describe(result)
    # Which of the two is said depends on whether its last report got out before the signal.
    ended = "w1 was stopped by a signal when the job ended: killing it" in result.errors
    lost = [line["worker_id"] for line in result.events("WorkerLost")]
    assert ended or lost == ["w1"], describe(result)
