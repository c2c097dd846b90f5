"""Processes that are stopped and not dead: the training state outlives them, and the job goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from craft.testing import Fault

from .jobs import TRAIN, Job, Jobs, References, describe, wait_for

STEPS = ("--steps", "150")


def events(job: Job, name: str) -> list[str]:
    return [line["worker_id"] for line in job.journal() if name in (line.get("event"), line.get("action"))]


def test_workers_that_are_all_stopped_are_waited_for_P1(jobs: Jobs, references: References, tmp_path: Path) -> None:
    job = jobs.start(TRAIN, *STEPS, "--slow-until", str(tmp_path / "hurry"), workers=2)
    job.reach_step(5)
    stopped = job.pids()
    for pid in stopped.values():
        os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: len(set(events(job, "Await"))) == 2, "the job waits for both")
    assert job.pids() == stopped
    for pid in stopped.values():
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: len(set(events(job, "Answered"))) == 2, "both answer")
    (tmp_path / "hurry").touch()
    result = job.wait()
    result.assert_exact(references.digest(*STEPS, workers=1), faults=0, steps=150)
    assert "w0 does not answer (stopped by a signal" in result.output, describe(result)
    assert "w0 answers again, and the job goes on" in result.output


def test_a_lighthouse_that_is_stopped_is_replaced_and_the_survivors_go_on_P1(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    lost = Fault(point="update", worker="w1", after_file="stopped")
    job = jobs.start(TRAIN, *STEPS, "--slow-until", str(tmp_path / "hurry"), workers=3, faults=[lost])
    job.reach_step(5)
    first = job.client.get_status()["lighthouse"]["pid"]
    keeper = job.helper("craft.cli.main")
    for pid in (keeper.pid, first):
        os.kill(pid, signal.SIGSTOP)
    (job.run_dir / "stopped").touch()
    (tmp_path / "hurry").touch()
    result = job.wait()
    result.assert_exact(references.digest(*STEPS, workers=1), faults=1, steps=150)
    started = [line["pid"] for line in result.events("LighthouseStarted")]
    assert started[0] == first and len(started) > 1, describe(result)
