"""Scripts that go on from their own file: ``start_step`` makes them the uninterrupted run; without it they are warned."""

from __future__ import annotations

from pathlib import Path

import pytest

from craft.testing.faults import PlacedFault

from .jobs import SCRIPTS, Jobs, describe
from .test_data import plans, used

SCRIPT = SCRIPTS / "own_file.py"
STEPS = 40
"""Five passes over 60 samples, 8 in a step."""
REPLACED = {"CRAFT_MAX_RESTARTS": "5"}


def test_a_script_that_goes_on_from_its_own_file_is_the_uninterrupted_one_P1_P2(jobs: Jobs, tmp_path: Path) -> None:
    """A worker that joins reads a newer file than the others did: it takes the job's step and state all the same."""
    whole = jobs.run(SCRIPT, "--file", str(tmp_path / "whole.pt"), workers=1)
    assert whole.exit_code == 0 and not whole.events("ScriptWarned"), describe(whole)
    file = tmp_path / "own.pt"
    first = jobs.run(SCRIPT, "--file", str(file), "--stop-after", "15", workers=2)
    assert first.exit_code == 0 and sorted(plans(first)) == list(range(15)), describe(first)
    faults = [PlacedFault(point="batch", rank=1, step=23), PlacedFault(point="before_acknowledge", rank=0, step=29)]
    second = jobs.run(
        SCRIPT, "--file", str(file), "--workers", "3", workers=3, faults=faults, environment=REPLACED
    )  # fmt: skip
    second.assert_exact(whole.digest, faults=2, steps=STEPS)
    assert {place: set(said) for place, said in {**used(first), **used(second)}.items()} == {
        place: set(said) for place, said in used(whole).items()
    }
    logs = [log.read_text() for log in second.run_dir.glob("workers/*/log")]
    assert sum("begins at 15\n" in log for log in logs) == 3
    assert any("begins at 20\n" in log or "begins at 25\n" in log for log in logs), describe(second)
    assert "begins at step 15, with what the script has loaded itself" in second.output
    assert not second.events("ScriptWarned")


def test_a_script_that_forgets_it_is_warned_once(jobs: Jobs, tmp_path: Path) -> None:
    file = tmp_path / "own.pt"
    first = jobs.run(SCRIPT, "--file", str(file), "--stop-after", "15", workers=1)
    assert first.exit_code == 0 and not first.events("ScriptWarned"), describe(first)
    forgotten = jobs.run(SCRIPT, "--file", str(file), "--forget", "--stop-after", "5", workers=2)
    assert forgotten.exit_code == 0, describe(forgotten)
    (warned,) = forgotten.events("ScriptWarned")
    assert warned["text"].startswith("optimizer (Adam) has made 15 steps already, and job.steps begins at step 0")
    assert forgotten.output.count("give job.steps(start_step=N)") == 1, describe(forgotten)


@pytest.mark.long
def test_the_newer_of_a_checkpoint_and_the_scripts_own_file_wins_P1(jobs: Jobs, tmp_path: Path) -> None:
    whole = jobs.run(SCRIPT, "--file", str(tmp_path / "whole.pt"), workers=1)
    file, store = tmp_path / "own.pt", tmp_path / "store"
    saves = ("--checkpoints", str(store), "--checkpoint-every", "12 steps")
    first = jobs.run(SCRIPT, "--file", str(file), "--stop-after", "18", workers=2, options=saves)
    assert first.exit_code == 0, describe(first)
    resumed = jobs.run(SCRIPT, "--file", str(file), "--stop-after", "22", workers=2, options=(*saves, "--resume"))
    (began,) = [*resumed.events("CheckpointRestored"), *resumed.events("StartStepTaken")]
    assert (began["event"], began["step"]) == ("CheckpointRestored", 18), describe(resumed)
    further = jobs.run(SCRIPT, "--file", str(file), "--stop-after", "25", workers=2)
    assert further.exit_code == 0 and sorted(plans(further)) == list(range(20, 25)), describe(further)
    last = jobs.run(SCRIPT, "--file", str(file), workers=2, options=(*saves, "--resume"))
    (began,) = [*last.events("CheckpointRestored"), *last.events("StartStepTaken")]
    assert (began["event"], began["step"]) == ("StartStepTaken", 25), describe(last)
    last.assert_exact(whole.digest, faults=0)
