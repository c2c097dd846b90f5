"""A second worker joins while the first one still catches up: both enter at the same step boundary as all others (P1 to P3)."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from craft.testing import Fault
from craft.testing.faults import struck

from .jobs import TRAIN, Jobs, References, describe, wait_for

STEPS = 150


@pytest.mark.parametrize("point", ["fetched", "loaded", "replayed"])
def test_a_joiner_that_lags_behind_enters_the_generation_of_the_next_joiner_with_all_others_P1(
    jobs: Jobs, references: References, tmp_path: Path, point: str
) -> None:
    """It has the state and says that it is ready, though its script is steps behind; nobody waits for it in vain."""
    hurry = tmp_path / "hurry"
    job = jobs.start(
        TRAIN, "--steps", str(STEPS), "--slow-until", str(hurry),
        workers=3,
        environment={"CRAFT_MAX_RESTARTS": "50", "CRAFT_HANG_LIMIT_S": "30"},
        faults=[Fault(point=point, kind="sleep", seconds=2.0, worker="w3")],
    )  # fmt: skip
    job.reach_step(5)
    job.kill("w1")
    wait_for(lambda: struck(job.run_dir), "the first joiner lags behind")
    job.kill("w2")
    wait_for(lambda: {"w3", "w4"} <= job.committing() or job.process.poll() is not None, "both commit", 60)
    hurry.touch()
    result = job.wait()
    result.assert_exact(references.digest("--steps", str(STEPS), workers=1), faults=2, steps=STEPS)
    times = sorted(commit.time for commit in result.run.commits["w0"])
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert max(pauses) < 10, "the others waited for each other" + describe(result)


def test_a_joiner_that_lags_behind_gives_the_state_to_the_next_one_when_nobody_else_is_left_P1(
    jobs: Jobs, references: References
) -> None:
    """A spare takes the place of the last one that kept pace, and is in the generation in which that shows."""
    job = jobs.start(
        TRAIN, "--steps", str(STEPS), "--slow-until", "run/struck/2",
        workers=2,
        options=("--spares", "2"),
        environment={"CRAFT_MAX_RESTARTS": "50"},
        faults=[
            Fault(point="update", step=5, worker="w1"),
            Fault(point="loaded", kind="sleep", seconds=1.0),
            Fault(point="forward", worker="w0", after_file="struck/1"),
        ],
    )  # fmt: skip
    result = job.wait()
    assert len(result.struck) == 3, describe(result)
    result.assert_exact(references.digest("--steps", str(STEPS), workers=1), faults=2, steps=STEPS)
    made = [line for line in result.run.journal if line.get("action") == "Reconfigure"]
    assert not any(line["again"] for line in made), "one of them waited in vain" + describe(result)
