"""A job that went back, or began again: what it left behind counts no more, and nothing else is missing."""

from __future__ import annotations

from craft.testing.history import check

from .runs import STEPS, Files, commit


def test_a_rollback_is_no_violation(files: Files) -> None:
    """A new branch goes back to an earlier step; its metrics are there for each branch."""
    again = [{**line, "branch": 1} for line in files.steps["w0"][2:]]
    files.steps["w0"] += again
    files.metrics += [{**line, "branch": 1} for line in files.metrics[2:]]
    assert check(files.write(), "d1").violations == (
        "P3: steps from 2 on were committed in branch 1, and the journal does not say why",
    )
    files.journal.insert(
        -1, {"time": 0.0, "kind": "event", "event": "RolledBack", "branch": 1, "step": 2, "left_at": 3, "skipped": 1}
    )
    assert check(files.write(), "d1").violations == ()


def begun_again(files: Files, at: int = 1) -> None:
    """Both die after step 3; w2 begins again after step ``at``, which leaves the steps from there on behind."""
    alone = dict.fromkeys("0123", "w2")
    files.steps["w2"] = [{**commit("w2", step, 3, alone), "branch": 1} for step in range(at, STEPS)]
    files.metrics = files.metrics[:3] + [{**line, "branch": 1} for line in files.metrics[at:]]
    end = next(place for place, line in enumerate(files.journal) if line.get("event") == "WorkerFinished")
    files.journal[end:] = [
        {"time": 0.0, "kind": "event", "event": "WorkerLost", "worker_id": "w0", "reason": "killed by SIGKILL"},
        {"time": 0.0, "kind": "action", "action": "Restore", "branch": 1, "step": at},
        {"time": 0.0, "kind": "event", "event": "WorkerJoined", "member": {"worker_id": "w2"}},
        {"time": 0.0, "kind": "action", "action": "Reconfigure", "generation": 3, "members": ["w2"]},
        {"time": 0.0, "kind": "event", "event": "CheckpointRestored", "branch": 1, "step": at},
        {**files.journal[end], "worker_id": "w2"},
    ]


def test_a_job_that_began_again_is_no_violation_though_nobody_wrote_the_metrics_of_its_last_step(files: Files) -> None:
    begun_again(files)
    assert check(files.write(), "d1").violations == ()


def test_steps_before_the_checkpoint_that_a_job_began_from_again_are_still_missed(files: Files) -> None:
    begun_again(files)
    del files.steps["w0"][0], files.steps["w1"][0]
    assert "P2: step 0 of 4 was not committed" in check(files.write(), "d1").violations


def test_a_job_that_began_again_too_late_has_left_something_out(files: Files) -> None:
    begun_again(files, at=3)
    for worker in ("w0", "w1"):
        del files.steps[worker][1:]
    del files.metrics[1:3]
    found = check(files.write(), "d1").violations
    assert "P2: branch 1 begins at step 3, and what came before it ends with step 0" in found


def test_what_was_computed_once_more_has_given_the_same_numbers(files: Files) -> None:
    begun_again(files)
    files.metrics[-2]["loss"] = 2.0
    (found,) = check(files.write(), "d1").violations
    assert found.startswith("P1: step 2 was computed twice, and gave")


def test_a_run_that_began_from_a_checkpoint_has_no_earlier_steps(files: Files) -> None:
    for lines in (*files.steps.values(), files.metrics):
        del lines[:2]
    assert "P2: step 0 of 4 was not committed" in check(files.write(), "d1").violations
    files.journal.insert(0, {"time": 0.0, "kind": "event", "event": "CheckpointRestored", "step": 2})
    assert check(files.write(), "d1").violations == ()
