"""Workers that hang in real ways are named, their stacks are kept, and the job goes on without them, exact (P1, P5)."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from craft.settings.rundir import RunDir
from craft.testing import liveness

from .jobs import SCRIPTS, TRAIN, Jobs, References, Result, describe, wait_for

HANGS = SCRIPTS / "hangs.py"
QUICK = {
    "CRAFT_HANG_LIMIT_S": "1.5",
    "CRAFT_UPDATE_LIMIT_S": "1.5",
    "CRAFT_FIRST_STEP_LIMIT_S": "60",
    "CRAFT_MAX_RESTARTS": "20",
}
"""Limits that a test can wait for; the defaults are for people."""


def hang(jobs: Jobs, kind: str, *more: str, environment: dict[str, str] | None = None) -> Result:
    return jobs.run(HANGS, "--kind", kind, *more, workers=3, environment={**QUICK, **(environment or {})})


@pytest.fixture(scope="module")
def reference(references: References) -> str:
    return references.digest_of(HANGS, workers=1)


@pytest.mark.parametrize(
    ("kind", "phase", "words"),
    [
        ("loop", "computing", "s of CPU used"),
        ("sleep", "computing", "asleep in the kernel"),
        ("gil", "computing", "GIL"),
        ("gil_thread", "computing", "GIL"),
        ("deadlock", "computing", "asleep in the kernel"),
        ("loader", "loading", "loading microbatch"),
        ("update", "updating", "in the script's code after the exchange"),
    ],
)
def test_a_worker_that_hangs_is_named_by_what_it_does_and_ended_P1_P5(
    jobs: Jobs, reference: str, kind: str, phase: str, words: str
) -> None:
    result = hang(jobs, kind)
    result.assert_exact(reference, faults=1, steps=60)
    (lost,) = result.events("WorkerLost")
    assert lost["source"] == "watch"
    assert words in lost["reason"], lost["reason"]
    found = [line for line in result.events("WorkerOverdue") if line["worker_id"] == lost["worker_id"]]
    assert found and found[-1]["phase"] in (phase, "gil")
    assert "hangs.py" in found[-1]["stack"], "the stack shows where in the script it was"
    log = RunDir(result.run_dir).log(lost["worker_id"]).read_text()
    assert "hangs:" in log and "hangs.py" in log
    assert ("`with job.paused(...)`, or let job.once(...) do it" in lost["reason"]) == (kind == "update")


def test_a_stopped_worker_is_lost_within_moments_P5(jobs: Jobs, references: References, tmp_path: Path) -> None:
    slow = ("--slow-until", str(tmp_path / "hurry"))
    job = jobs.start(TRAIN, "--steps", "150", *slow, workers=3, environment={"CRAFT_MAX_RESTARTS": "20"})
    job.reach_step(10)
    began = time.time()
    psutil.Process(job.pids()["w1"]).send_signal(signal.SIGSTOP)
    (tmp_path / "hurry").touch()
    result = job.wait()
    result.assert_exact(references.digest("--steps", "150", workers=1), faults=1)
    (lost,) = result.events("WorkerLost")
    assert "stopped by a signal" in lost["reason"]
    assert lost["seen"] - began < 20, "half a second, and what a busy machine adds to it"


def test_a_worker_that_keeps_the_gil_for_some_seconds_is_not_taken_for_dead(jobs: Jobs, reference: str) -> None:
    result = hang(jobs, "gil_for_a_while", "--seconds", "3", environment={"CRAFT_HANG_LIMIT_S": "30"})
    result.assert_exact(reference, faults=0, steps=60)


def test_a_pause_that_is_announced_is_not_taken_for_a_hang_and_is_in_the_journal(jobs: Jobs, reference: str) -> None:
    result = hang(jobs, "paused", "--seconds", "4")
    result.assert_exact(reference, faults=0, steps=60)
    (line,) = result.events("WorkerPaused")
    assert line["reason"] == "evaluation" and line["seconds"] >= 4
    report = liveness.check(result.run_dir, limit_s=3.0, exit_code=0)
    assert report.violations == () and len(report.pauses) == 1, report


def test_something_long_that_all_workers_do_is_not_taken_for_a_hang(jobs: Jobs, reference: str) -> None:
    hang(jobs, "all_slow", "--seconds", "4").assert_exact(reference, faults=0, steps=60)


def test_a_slow_first_step_is_not_taken_for_a_hang(jobs: Jobs, reference: str) -> None:
    hang(jobs, "sleep", "--at", "0", "--seconds", "4").assert_exact(reference, faults=0, steps=60)


def test_a_worker_that_a_person_declares_failed_is_ended_and_replaced_P1(jobs: Jobs, references: References) -> None:
    job = jobs.start(TRAIN, "--steps", "150", workers=3, environment={"CRAFT_MAX_RESTARTS": "20"})
    job.reach_step(5)
    answer = job.client.report_failure(worker_id="w2", reason="its fan is loud")
    assert [action["action"] for action in answer["actions"]] == ["Fence", "Reconfigure"]
    wait_for(lambda: "w3" in job.pids() or job.process.poll() is not None, "a replacement has joined")
    job.wait().assert_exact(references.digest("--steps", "150", workers=1), faults=1)


def test_one_that_is_stopped_before_it_joins_is_ended_and_replaced_P1(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    """Nobody waits for it; but its place would stay empty, and the job would never see it end."""
    script = tmp_path / "late.py"
    stops = "import os, runpy, signal\nif os.environ['CRAFT_WORKER_ID'] == 'w2': os.kill(os.getpid(), signal.SIGSTOP)\n"
    script.write_text(f"{stops}runpy.run_path({str(TRAIN)!r}, run_name='__main__')\n")
    steps, hurry = ("--steps", "100"), tmp_path / "hurry"
    job = jobs.start(
        script, *steps, "--slow-until", str(hurry), workers=2, environment={"CRAFT_MAX_RESTARTS": "2"}
    )  # fmt: skip
    job.reach_step(3)
    job.kill("w1")
    job.wait_for_committing(3)
    hurry.touch()
    result = job.wait()
    assert result.exit_code == 0 and result.digest == references.digest(*steps, workers=1), describe(result)
    assert not result.run.commits.get("w2")
