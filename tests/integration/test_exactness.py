"""The final state does not depend on the number of workers, on when which of them die, or on whose code raises (P1, P2)."""

from __future__ import annotations

import os
import random
import textwrap
import time
from pathlib import Path

import pytest

from craft.testing import Fault
from craft.testing.history import check

from .jobs import TRAIN, Jobs, References, describe

NUM_KILL_RUNS = int(os.environ.get("CRAFT_TEST_KILL_RUNS", "4"))
"""Jobs with random kills; 20 is the long version."""
KILL_STEPS = 60


@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_workers_does_not_change_a_bit_P1(references: References, workers: int) -> None:
    steps = ("--steps", str(KILL_STEPS))
    assert references.digest(*steps, workers=workers) == references.digest(*steps, workers=4)


@pytest.mark.parametrize("seed", range(NUM_KILL_RUNS))
def test_kills_at_random_moments_do_not_change_a_bit_P1_P2_P3(
    jobs: Jobs, references: References, tmp_path: Path, seed: int
) -> None:
    """One to three of four workers die, each at a moment of its own."""
    chance = random.Random(seed)
    # Early enough to be there before the job ends by itself.
    kills = sorted((chance.randrange(KILL_STEPS // 2), chance.random()) for _ in range(chance.randint(1, 3)))
    hurry = tmp_path / "hurry"
    job = jobs.start(TRAIN, "--steps", str(KILL_STEPS), "--slow-until", str(hurry))
    living = ["w0", "w1", "w2", "w3"]
    for step, share in kills:
        job.reach_step(step)
        # Anywhere within the next steps.
        time.sleep(0.03 * share)
        job.kill(living.pop(chance.randrange(len(living))))
    hurry.touch()
    expected = references.digest("--steps", str(KILL_STEPS))
    job.wait().assert_exact(expected, faults=len(kills), steps=KILL_STEPS)


def test_under_shrink_lost_microbatches_are_dropped_and_said_to_be(jobs: Jobs, references: References) -> None:
    fault = Fault(point="batch", step=5, rank=2)
    result = jobs.run(faults=[fault], options=["--on-loss", "shrink"])
    assert result.exit_code == 0, describe(result)
    report = check(result.run_dir)
    assert report.violations == (), describe(result)
    assert report.dropped == ((5, 4), (5, 5))
    assert [line["dropped"] for line in result.events("StepRetried")] == [[4, 5]]
    # Dropping is not exact, and must not look so.
    assert report.digest not in (None, references.digest())


def test_an_error_on_one_worker_is_a_fault_like_any_other_P1_P2(jobs: Jobs, references: References) -> None:
    """Of four workers, three raise: one in forward, one in backward, one in the update code."""
    places = [("forward", 2, 3), ("backward", 4, 2), ("update", 6, 1)]
    faults = [Fault(point=point, kind="raise", step=step, rank=rank) for point, step, rank in places]
    result = jobs.run(faults=faults)
    result.assert_exact(references.digest(), faults=3)
    failed = result.events("WorkerFailed")
    assert [line["step"] for line in failed] == [2, 4, 6]
    assert [line["microbatch"] is None for line in failed] == [False, False, True]
    assert all("InjectedError" in line["traceback"] for line in failed)


def test_an_error_in_the_exchange_of_one_worker_is_a_fault_like_any_other_P1_P3(
    jobs: Jobs, references: References
) -> None:
    """On the exchange thread and on the main thread."""
    places = [("result_sent", 3), ("before_acknowledge", 6)]
    result = jobs.run(faults=[Fault(point=point, kind="raise", step=step, rank=2) for point, step in places])
    result.assert_exact(references.digest(), faults=2)


def test_an_error_on_the_last_worker_ends_the_job_with_its_traceback(jobs: Jobs) -> None:
    result = jobs.run(workers=1, faults=[Fault(point="forward", kind="raise", step=5)])
    assert result.exit_code == 1, describe(result)
    assert "the last one" in result.output
    assert "Traceback" in result.output and "InjectedError: injected by a test at forward of step 5" in result.output


BUGGY = """
    import torch
    import craft

    {before_join}
    job = craft.join()
    {after_join}
    model = job.replicate(torch.nn.Linear(2, 1))
    dataset = torch.utils.data.TensorDataset(torch.ones(64, 2))
    for step in job.steps(dataset, global_batch=8, microbatches=8, steps=6):
        for (x,) in step:
            if (step.number, step.microbatch) == (3, 5):
                {in_microbatch}
            model(x).sum().backward()
"""


def buggy(folder: Path, **bugs: str) -> Path:
    """Write a script that has a bug at one of three places."""
    places = {"before_join": "pass", "after_join": "pass", "in_microbatch": "pass", **bugs}
    script = folder / "buggy.py"
    script.write_text(textwrap.dedent(BUGGY).format(**places))
    return script


@pytest.mark.parametrize("place", ["before_join", "after_join"])
def test_an_error_before_the_first_step_is_a_bug_and_ends_the_job(jobs: Jobs, tmp_path: Path, place: str) -> None:
    result = jobs.run(buggy(tmp_path, **{place: "raise ValueError('no data in /data')"}))
    assert result.exit_code == 1, describe(result)
    assert "Traceback" in result.output and "ValueError: no data in /data" in result.output
    assert "before the first step" in result.output


def test_an_error_that_comes_again_on_a_second_worker_is_a_bug_and_ends_the_job(jobs: Jobs, tmp_path: Path) -> None:
    result = jobs.run(buggy(tmp_path, in_microbatch="raise ValueError('a bad sample')"))
    assert result.exit_code == 1, describe(result)
    failed = [line["worker_id"] for line in result.events("WorkerFailed")]
    assert len(failed) == len(set(failed)) == 2
    assert f"step 3, microbatch 5 failed on workers {failed[0]} and {failed[1]}" in result.output
    assert "Traceback" in result.output and "ValueError: a bad sample" in result.output
