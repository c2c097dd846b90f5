"""Jobs that lose everything at once and go on from a checkpoint, with the same bits (P1 to P3, P7)."""

from __future__ import annotations

from pathlib import Path

import pytest

from craft.settings.rundir import RunDir
from craft.telemetry.records.journal import read_lines
from craft.testing import Fault

from .jobs import SCRIPTS, TRAIN, Job, Jobs, References, Result, describe, wait_for
from .stores import STEPS, into, kill_all, manifests, start_and_lose_all


def resumed_from(result: Result) -> int:
    (event,) = result.events("CheckpointRestored")
    return int(event["step"])


# When everything is lost.


@pytest.mark.parametrize(
    "workers", [pytest.param(4, marks=pytest.mark.long), 2, pytest.param(9, marks=pytest.mark.long)]
)
def test_a_job_of_which_nothing_is_left_goes_on_with_the_same_bits_with_any_number_of_workers_P1_P7(
    jobs: Jobs, references: References, tmp_path: Path, workers: int
) -> None:
    store = tmp_path / "store"
    start_and_lose_all(jobs, store)
    result = jobs.run(TRAIN, *STEPS, workers=workers, options=into(store, "--resume"))
    result.assert_exact(references.digest(*STEPS), faults=0, steps=60)
    assert resumed_from(result) % 10 == 0 and resumed_from(result) >= 10


def test_a_job_that_is_lost_again_and_again_ends_with_the_same_bits_P1_P7(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    for after in (12, 25, 40):
        slow = ("--slow-until", str(tmp_path / "never"))
        job = jobs.start(TRAIN, *STEPS, *slow, workers=3, options=into(store, "--resume"))
        come_to(job, after)
        kill_all(job)
    result = jobs.run(TRAIN, *STEPS, workers=3, options=into(store, "--resume"))
    result.assert_exact(references.digest(*STEPS), faults=0, steps=60)


def come_to(job: Job, step: int) -> None:
    """Wait until this step is committed, wherever the job began."""

    def there() -> bool:
        return any(int(line["step"]) >= step for line in read_lines(RunDir(job.run_dir).metrics))

    wait_for(there, f"step {step} is committed")


def test_what_is_lost_while_a_job_begins_from_a_checkpoint_is_left_out_P1_P3(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    start_and_lose_all(jobs, store)
    faults = [Fault(point="verified", rank=0), Fault(point="verified", rank=2)]
    result = jobs.run(TRAIN, *STEPS, options=into(store, "--resume"), faults=faults)
    result.assert_exact(references.digest(*STEPS), faults=len(result.struck))
    assert result.struck


def test_the_newest_one_that_is_whole_is_used_and_a_damaged_one_is_named_P7(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    start_and_lose_all(jobs, store, complete=2)
    before, newest = manifests(store)[-2:]
    only = set(newest.read_text().split('"')) - set(before.read_text().split('"'))
    chunk = next(path for path in store.glob("chunks/*/*") if path.name in only and path.stat().st_size > 1000)
    data = bytearray(chunk.read_bytes())
    data[500] ^= 1
    chunk.write_bytes(data)
    result = jobs.run(TRAIN, *STEPS, options=into(store, "--resume"))
    result.assert_exact(references.digest(*STEPS), faults=0)
    (rejected,) = result.events("CheckpointRejected")
    assert chunk.name in rejected["reason"] and rejected["name"] == newest.stem
    assert resumed_from(result) == int(before.stem.split("-")[1])


def test_a_finished_job_has_nothing_left_to_do(jobs: Jobs, references: References, tmp_path: Path) -> None:
    options = into(tmp_path / "store")
    jobs.run(TRAIN, workers=2, options=options).assert_exact(references.digest(), faults=0)
    result = jobs.run(TRAIN, workers=2, options=(*options, "--resume"))
    result.assert_exact(references.digest(), faults=0)
    assert resumed_from(result) == 10


@pytest.mark.long
def test_it_may_train_for_longer_than_was_said_at_first(jobs: Jobs, tmp_path: Path) -> None:
    options = into(tmp_path / "store")
    assert jobs.run(TRAIN, "--steps", "10", workers=2, options=options).exit_code == 0
    result = jobs.run(TRAIN, "--steps", "20", workers=2, options=(*options, "--resume"))
    assert result.exit_code == 0 and result.run.commits["w0"][-1].step == 19


# What cannot be.


def test_resume_begins_anew_where_there_is_nothing(jobs: Jobs, references: References, tmp_path: Path) -> None:
    result = jobs.run(TRAIN, options=into(tmp_path / "store", "--resume"))
    result.assert_exact(references.digest(), faults=0, steps=10)


def test_what_cannot_go_on_is_refused_with_a_sentence(jobs: Jobs, tmp_path: Path) -> None:
    store = tmp_path / "store"
    (tmp_path / "a_file").touch()
    assert jobs.run(TRAIN, workers=1, options=into(store)).exit_code == 0
    for options, sentence in (
        (into(store), "holds checkpoints already, the newest of step 10: go on from there with --resume"),
        (into(store, "--resume", "7"), f"--resume 7: there is no checkpoint of step 7 in {store}; there are: 10"),
        (("--resume",), "Say where checkpoints are: --checkpoints URL, or job.checkpoints(url)"),
        (into(tmp_path / "a_file"), "checkpoints cannot be written"),
    ):
        result = jobs.run(TRAIN, workers=1, options=options)
        assert result.exit_code == 2 and sentence in result.output + result.errors, describe(result)
        assert "Traceback" not in result.output and " 0 faults" in result.output


def test_a_job_does_not_begin_anew_where_all_that_is_there_is_damaged_P7(jobs: Jobs, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert jobs.run(TRAIN, workers=1, options=into(store)).exit_code == 0
    for path in manifests(store):
        path.write_text(path.read_text().replace('"step":10', '"step":11'))
    result = jobs.run(TRAIN, workers=2, options=into(store, "--resume"))
    assert result.exit_code == 2 and "repair or remove what is there" in result.output, describe(result)
    assert result.events("CheckpointRejected")


def test_a_job_with_another_seed_does_not_go_on(jobs: Jobs, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN.read_text().replace("seed=1", "seed=2"))
    store = tmp_path / "store"
    assert jobs.run(TRAIN, workers=2, options=into(store)).exit_code == 0
    result = jobs.run(script, workers=2, options=into(store, "--resume"))
    assert result.exit_code == 2, describe(result)
    assert "the checkpoint is of a job with seed=1, and this one has seed=2" in result.output


# Going back.


def test_a_job_that_goes_back_to_a_step_by_hand_has_a_course_of_its_own_P3(jobs: Jobs, tmp_path: Path) -> None:
    """What was there after that step must not be taken for what follows it."""
    store = tmp_path / "store"
    assert jobs.run(TRAIN, "--steps", "20", workers=1, options=into(store)).exit_code == 0
    job = jobs.start(TRAIN, *STEPS, workers=1, options=into(store, "--resume", "10", "--checkpoint-every", "4 steps"))
    come_to(job, 13)
    wait_for(lambda: manifests(store)[-1].name.startswith("0001-"), "a checkpoint of the new course")
    kill_all(job)
    newest = int(manifests(store)[-1].stem.split("-")[1])
    result = jobs.run(TRAIN, "--steps", "24", workers=1, options=into(store, "--resume"))
    assert result.exit_code == 0 and resumed_from(result) == newest, describe(result)
    assert {commit.branch for commit in result.run.commits["w0"]} <= {1}


def test_going_back_from_bad_numbers_never_leads_forward_to_what_another_course_left_P3(
    jobs: Jobs, tmp_path: Path
) -> None:
    options = into(tmp_path / "store", "--checkpoint-keep", "9")
    assert jobs.run(TRAIN, "--steps", "40", workers=1, options=options).exit_code == 0
    options = (*options, "--resume", "10", "--on-divergence", "rollback")
    result = jobs.run(TRAIN, "--steps", "40", "--nan-at", "15", workers=1, options=options)
    # The same step is bad every time, until that is enough.
    assert {(event["left_at"], event["step"]) for event in result.events("RolledBack")} == {(16, 10)}, describe(result)


def test_steps_that_give_another_state_after_resume_are_named_P7(jobs: Jobs, tmp_path: Path) -> None:
    """What the script changes in its loop, and registers nowhere, is in no checkpoint."""
    options = into(tmp_path / "store", "--checkpoint-every", "10 steps")
    drifts = ("--drift-at", "5", "--switch-every", "1000")
    first = jobs.run(TRAIN, "--steps", "14", *drifts, workers=2, options=options)
    assert first.exit_code == 0, describe(first)

    same = jobs.run(TRAIN, "--steps", "14", *drifts, workers=2, options=(*options, "--resume", "10"))
    assert same.exit_code == 1, describe(same)
    assert (
        "was computed again from the checkpoint of step 10, by the same script, and left another state" in same.output
    )

    changed = jobs.run(TRAIN, "--steps", "13", *drifts, workers=2, options=(*options, "--resume", "10"))
    assert changed.exit_code == 0, describe(changed)
    assert all("by another version of the script" in line["text"] for line in changed.events("ScriptWarned"))
    assert changed.events("ScriptWarned")


def test_a_job_that_its_script_stopped_trains_no_further_unless_the_step_is_named_P1(
    jobs: Jobs, tmp_path: Path
) -> None:
    script, store = (SCRIPTS / "data" / "ends.py", "stop-outside"), tmp_path / "store"
    first = jobs.run(*script, workers=2, options=into(store))
    again = jobs.run(*script, workers=2, options=into(store, "--resume"))
    assert again.exit_code == 0 and again.digest == first.digest, describe(again)
    (event,) = again.events("ScriptWarned")
    assert event["text"] == (
        "the script stopped this job after 5 steps (w1 has seen enough): --resume trains no further;"
        " --resume 5 goes on past that stop"
    )
    past = jobs.run(*script, workers=2, options=into(store, "--resume", "5"))
    assert past.exit_code == 0, describe(past)
    assert max(int(line["step"]) for line in read_lines(RunDir(past.run_dir).metrics)) == 999, describe(past)
