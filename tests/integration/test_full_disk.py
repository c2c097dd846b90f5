"""The disk of the run directory is full for a while: training goes on, losses are answered, and in the end nothing is missing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.small_disk import fill, mounted

from .jobs import TRAIN, Job, Jobs, References, wait_for

STEPS = ("--steps", "200")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "1m") as place:
        yield place


def start(jobs: Jobs, disk: Path, *arguments: str, workers: int) -> Job:
    job = jobs.start(TRAIN, *arguments, workers=workers, options=("--dir", str(disk / "run")))
    job.run_dir = disk / "run"
    return job


def said(job: Job) -> str:
    return job.files.with_suffix(".out").read_text()


@pytest.mark.long
def test_a_full_disk_is_told_and_costs_no_record_P1(jobs: Jobs, references: References, disk: Path) -> None:
    """Also if the lighthouse and a worker are killed meanwhile."""
    go = disk.parent / "go"
    job = start(jobs, disk, *STEPS, "--slow-until", str(go), workers=3)
    job.reach_step(3)
    filler = fill(disk)
    wait_for(lambda: "cannot be written: No space left on device. Training goes on" in said(job), "it is told")
    before = job.client.get_status()
    os.kill(before["lighthouse"]["pid"], signal.SIGKILL)
    wait_for(lambda: job.client.get_status()["lighthouse"]["pid"] != before["lighthouse"]["pid"], "another one serves")
    job.kill("w1")
    wait_for(lambda: job.client.get_status()["generation"] > before["generation"], "the others go on")
    reached = job.client.get_status()["step"]
    wait_for(lambda: job.client.get_status()["step"] > reached, "they commit")
    assert not list(disk.glob("run/.address*"))
    filler.unlink()
    wait_for(lambda: "records can be written again" in said(job), "that is told, too")
    go.touch()
    result = job.wait()
    # The agent says it once for the job. The leader's log may have had room for its own line, which is then shown, too.
    assert result.output.count("No space left on device. Training goes on") == 1
    assert result.output.count("No space left on device. The job goes on") <= 1
    assert "Traceback" not in result.output + result.errors
    result.assert_exact(references.digest(*STEPS, workers=3), faults=1, steps=200)


def test_a_job_ends_well_on_a_disk_that_stays_full(jobs: Jobs, disk: Path) -> None:
    go = disk.parent / "go"
    job = start(jobs, disk, "--steps", "10", "--slow-until", str(go), workers=2)
    job.reach_step(1)
    fill(disk)
    go.touch()
    result = job.wait()
    assert result.exit_code == 0
    assert "\n  10 steps in " in result.output
