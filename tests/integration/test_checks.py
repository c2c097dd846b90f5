"""Mistakes of a script that would give a wrong result unseen: each is found in the first steps, and named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from craft.settings.rundir import RunDir
from craft.testing.faults import PlacedFault

from .jobs import SCRIPTS, TRAIN, Jobs, References, describe, wait_for

MISTAKES = SCRIPTS / "mistakes.py"
DRIFTS = SCRIPTS / "drifts.py"


def test_an_optimizer_that_is_not_registered_is_refused_in_the_first_step(jobs: Jobs) -> None:
    result = jobs.run(MISTAKES, "--kind", "unregistered", workers=2)

    assert result.exit_code == 2, describe(result)
    assert "the optimizer Adam (mistakes.py, line " in result.output
    assert "trains model.0.weight, model.0.bias, model.1.weight and 3 more and is not registered" in result.output
    assert "Before job.steps add: job.register(optimizer=optimizer)" in result.output
    assert {commit.step for commits in result.run.commits.values() for commit in commits} <= {0}


def test_it_is_refused_in_a_plain_run_as_well(tmp_path: Path) -> None:
    command = [sys.executable, str(MISTAKES), "--kind", "unregistered"]
    plain = {key: value for key, value in os.environ.items() if not key.startswith("CRAFT_")}
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=plain, timeout=90, check=False)

    assert found.returncode == 2, found.stderr
    assert "Before job.steps add: job.register(optimizer=optimizer)" in found.stderr


@pytest.mark.parametrize(
    ("kind", "workers"), [("generator", 3), ("stream", 1), pytest.param("stream", 2, marks=pytest.mark.long)]
)
def test_a_microbatch_that_depends_on_those_before_it_ends_the_job_P1(jobs: Jobs, kind: str, workers: int) -> None:
    result = jobs.run(MISTAKES, "--kind", kind, workers=workers)

    assert result.exit_code == 1, describe(result)
    assert "of step 3 gave other bits " in result.output, describe(result)
    assert "a stream that ignores start_step" in result.output and "step.carry(...)" in result.output
    assert {commit.step for commits in result.run.commits.values() for commit in commits} == {0, 1, 2}


@pytest.mark.long
def test_a_script_that_carries_state_trains_where_the_comparison_is_switched_off(jobs: Jobs) -> None:
    assert jobs.run(MISTAKES, "--kind", "generator", workers=2, options=["--no-check-bits"]).exit_code == 0


def test_a_worker_that_is_lost_while_a_microbatch_is_computed_twice_changes_no_bit_P1(
    jobs: Jobs, references: References
) -> None:
    reference = references.digest("--steps", "10", workers=3)

    # Of 8 microbatches w1 has 3: the fourth in step 3 is the one that is computed for comparison.
    lost = PlacedFault(point="batch", worker="w1", step=3, occurrence=4)
    result = jobs.run(TRAIN, "--steps", "10", workers=3, faults=[lost])

    assert result.struck, describe(result)
    result.assert_exact(reference, faults=1, steps=10)


def test_a_buffer_that_the_leader_alone_changed_is_named_in_the_next_step(jobs: Jobs) -> None:
    result = jobs.run(MISTAKES, "--kind", "leader", workers=3)

    assert result.exit_code == 1, describe(result)
    (diverged,) = result.events("StateDiverged")
    assert diverged["step"] == 6
    assert "model.1.running_mean differs between w1, w2 | w0 as step 6 begins" in result.output, describe(result)
    assert "model.eval()" in result.output


def test_parameters_that_are_frozen_on_one_worker_only_are_named(jobs: Jobs) -> None:
    result = jobs.run(MISTAKES, "--kind", "frozen", workers=3)

    assert result.exit_code == 1, describe(result)
    assert "before step 6 the script freezes other parameters on some workers than on others" in result.output
    assert "w1, w2 train model.0.weight, model.0.bias, w0 not" in result.output, describe(result)


def test_a_newcomer_whose_state_differs_leaves_and_the_others_train_on_P1(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    arguments = ("--kind", "counter", "--steps", "120")
    reference = references.digest_of(MISTAKES, *arguments, workers=3)
    hurry = tmp_path / "hurry"

    job = jobs.start(
        MISTAKES,
        *(*arguments, "--slow-until", str(hurry)),
        workers=3,
        faults=[PlacedFault(point="batch", worker="w1", step=10)],
        # Without the comparison of gradients only the state itself shows it.
        options=["--no-check-bits"],
        environment={"CRAFT_MAX_RESTARTS": "1"},
    )
    failed = wait_for(
        lambda: next((line for line in job.journal() if line.get("event") == "WorkerFailed"), None), "it is refused"
    )
    hurry.touch()
    result = job.wait()

    assert (failed["worker_id"], failed["refused"]) == ("w3", True), describe(result)
    assert "after it joined, w3 has another state at step " in failed["error"]
    assert "who train on without it" in result.output, describe(result)
    assert (result.exit_code, result.digest) == (0, reference), describe(result)


@pytest.mark.parametrize(
    ("loop", "found"),
    [
        ("own", "microbatch 0 of step "),
        ("rows", "microbatch 0 of step "),
        ("loss", "after it joined, w2 has other bits in microbatch 0 at step "),
    ],
)
def test_a_newcomer_without_an_attribute_that_the_loop_changed_leaves_wherever_that_shows_P1(
    jobs: Jobs, references: References, tmp_path: Path, loop: str, found: str
) -> None:
    reference = references.digest_of(DRIFTS, "--loop", loop, workers=1)
    hurry = tmp_path / "hurry"
    job = jobs.start(
        DRIFTS,
        *("--loop", loop, "--slow-until", str(hurry)),
        workers=2,
        faults=[PlacedFault(point="batch", worker="w1", step=10)],
        environment={"CRAFT_MAX_RESTARTS": "1"},
    )
    failed = wait_for(
        lambda: next((line for line in job.journal() if line.get("event") == "WorkerFailed"), None), "it is refused"
    )
    hurry.touch()
    result = job.wait()

    assert (failed["worker_id"], failed["refused"]) == ("w2", True), describe(result)
    assert found in failed["error"] and "register_state" in failed["error"], failed["error"]
    assert (result.exit_code, result.digest) == (0, reference), describe(result)


def test_warnings_are_on_the_terminal_and_in_the_journal_once(jobs: Jobs) -> None:
    result = jobs.run(MISTAKES, "--kind", "sampler", workers=2)

    assert result.exit_code == 0, describe(result)
    told = [line["text"] for line in result.events("ScriptWarned")]
    assert len(told) == 2, told
    assert any("the DataLoader has a DistributedSampler for 2 replicas, which is not used" in text for text in told)
    assert any("the loss is a sum over the samples of a microbatch" in text for text in told)
    assert all(f"warning: {text}" in result.output for text in told)
    assert told[0] in RunDir(result.run_dir).log("w0").read_text()
