"""Numbers that are not finite: all workers see them in the same step and do the same (P1 to P3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from craft.testing import Fault

from .jobs import SCRIPTS, Jobs, References, Result, describe

SCRIPT = SCRIPTS / "diverge.py"
POISONED = ("--poison", "16")
ENDS: dict[str, Any] = {"workers": 3}
REPLACED = {"CRAFT_MAX_RESTARTS": "5"}


def answer(name: str) -> tuple[str, ...]:
    return ("--on-divergence", name)


def noticed(result: Result) -> list[int]:
    return [int(line["step"]) for line in result.events("NumbersDiverged")]


def test_by_default_it_is_told_and_nothing_else(jobs: Jobs) -> None:
    result = jobs.run(SCRIPT, *POISONED, workers=2)
    assert result.exit_code == 0, describe(result)
    assert noticed(result) == [16], "weights are gone from then on, and it is told once"
    assert "step 16: loss is nan: nothing is done about it" in result.output


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("skip", ("--finite-loss",)),
        pytest.param("lower-lr", (), marks=pytest.mark.long),
        pytest.param("skip", (), marks=pytest.mark.long),
        pytest.param("lower-lr", ("--finite-loss",), marks=pytest.mark.long),
    ],
)
def test_a_step_that_changes_nothing_is_the_same_for_all_also_for_those_who_join_later_P1_P3(
    jobs: Jobs, name: str, arguments: tuple[str, ...]
) -> None:
    alone = jobs.run(SCRIPT, *POISONED, *arguments, workers=1, options=answer(name))
    assert alone.exit_code == 0 and noticed(alone) == [16], describe(alone)
    faults = [Fault(point="update", step=16, rank=1), Fault(point="before_acknowledge", step=18, rank=0)]
    result = jobs.run(SCRIPT, *POISONED, *arguments, **ENDS, options=answer(name), faults=faults, environment=REPLACED)
    result.assert_exact(alone.digest, faults=2, steps=40)
    assert noticed(result) == [16]


def test_answers_differ(jobs: Jobs) -> None:
    """Or the tests above would hold for a job that ignores what it was told."""
    found = {name: jobs.run(SCRIPT, *POISONED, workers=1, options=answer(name)).digest for name in ("skip", "lower-lr")}
    assert found["skip"] != found["lower-lr"]


def go_back(store: Path) -> dict[str, Any]:
    return {"options": (*answer("rollback"), "--checkpoints", str(store), "--checkpoint-every", "10 steps")}


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param((), marks=pytest.mark.long),
        (Fault(point="verified", rank=0), Fault(point="verified", rank=1)),
        pytest.param((Fault(point="update", step=16, rank=2),), marks=pytest.mark.long),
        (Fault(point="batch", step=22, rank=0),),
    ],
    ids=["undisturbed", "while_going_back", "just_before", "after_it"],
)
def test_a_job_that_went_back_is_the_job_that_never_had_the_data_since_P1_P3(
    jobs: Jobs, references: References, tmp_path: Path, faults: tuple[Fault, ...]
) -> None:
    """Data of the steps 10 to 16 is left out; 40 steps are done all the same."""
    store = tmp_path / "store"
    expected = references.digest_of(SCRIPT, "--without", "10", "17", workers=1)
    result = jobs.run(
        SCRIPT,
        *POISONED,
        "--await-checkpoint",
        str(store),
        **go_back(store),
        **ENDS,
        faults=faults,
        environment=REPLACED,
    )
    result.assert_exact(expected, faults=len(result.struck))
    (back,) = result.events("RolledBack")
    assert (back["branch"], back["step"], back["left_at"], back["skipped"]) == (1, 10, 17, 7)
    assert {commit.branch for commit in result.run.commits["w1"]} <= {0, 1}


def test_without_a_checkpoint_to_go_back_to_the_step_changes_nothing(jobs: Jobs, tmp_path: Path) -> None:
    skipped = jobs.run(SCRIPT, "--poison", "3", workers=2, options=answer("skip"))
    refused = jobs.run(SCRIPT, workers=1, options=answer("rollback"))
    assert refused.exit_code == 2 and "needs checkpoints to go back to" in refused.output, describe(refused)
    result = jobs.run(SCRIPT, "--poison", "3", workers=2, **go_back(tmp_path / "store"))
    result.assert_exact(skipped.digest, faults=0)
    assert not result.events("RolledBack")
    assert "the step changes nothing, instead of going back: there is no checkpoint" in result.output


def test_numbers_that_do_not_become_finite_by_going_back_end_the_job(jobs: Jobs, tmp_path: Path) -> None:
    store = tmp_path / "store"
    poison = [str(step) for step in range(16, 100)]
    result = jobs.run(SCRIPT, "--poison", *poison, "--await-checkpoint", str(store), workers=2, **go_back(store))
    assert result.exit_code == 1, describe(result)
    assert "went back to the checkpoint of step 10 3 times" in result.output
    assert len(result.events("RolledBack")) == 3


def test_a_job_that_is_to_stop_then_says_why(jobs: Jobs) -> None:
    result = jobs.run(SCRIPT, *POISONED, workers=2, options=answer("stop"))
    assert result.exit_code == 1, describe(result)
    assert "loss is nan in step 16: the job ends, as --on-divergence stop says" in result.output


def spikes(window: int) -> tuple[str, ...]:
    return ("--set", "divergence.spike_ratio=50", "--set", f"divergence.spike_window={window}")


@pytest.mark.long
def test_a_finite_spike_is_answered_by_all_also_by_a_worker_that_joined_before_it_P1_P3(jobs: Jobs) -> None:
    """The window is longer than what the joiner has seen itself: the values before came with the state."""
    options = (*answer("skip"), *spikes(25))
    alone = jobs.run(SCRIPT, "--spike", "30", workers=1, options=options)
    assert alone.exit_code == 0 and noticed(alone) == [30], describe(alone)
    told = alone.events("NumbersDiverged")[0]["what"]
    assert told.startswith("loss is ") and "times the median of the last 25 steps" in told
    result = jobs.run(
        SCRIPT, "--spike", "30", "--workers", "3", workers=3, options=options, environment=REPLACED,
        faults=[Fault(point="batch", step=12, rank=1)],
    )  # fmt: skip
    result.assert_exact(alone.digest, faults=1, steps=40)
    assert noticed(result) == [30]
    joined = [commit.step for commit in result.run.commits["w3"] if commit.microbatches]
    assert joined and joined[0] < 30, describe(result)


@pytest.mark.long
def test_a_job_that_went_back_from_a_spike_is_the_job_that_never_had_the_data_since_P1_P3(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    expected = references.digest_of(SCRIPT, "--without", "10", "17", workers=1)
    more = (*go_back(store)["options"], *spikes(8))
    result = jobs.run(SCRIPT, "--spike", "16", "--await-checkpoint", str(store), workers=3, options=more)
    result.assert_exact(expected, faults=0)
    (back,) = result.events("RolledBack")
    assert (back["step"], back["left_at"], back["skipped"]) == (10, 17, 7)
    assert "times the median of the last 8 steps" in back["reason"]
