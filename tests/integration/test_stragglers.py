"""A slow worker is found by what it takes for a microbatch, others take over from it, and no bit changes (P1 to P3)."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

import pytest

from craft.settings.rundir import RunDir
from craft.telemetry.records.journal import read_lines
from craft.testing.cpu_throttle import CpuThrottle
from craft.wire.auth import bearer, read_token

from .jobs import TRAIN, Job, Jobs, References, Result, wait_for

STEPS = 150
# Whoever stops a worker for moments may be held up itself: that is no loss here.
REPLACE = {"CRAFT_MAX_RESTARTS": "20", "CRAFT_STOP_LIMIT_S": "60"}


class Slowed:
    """Runs jobs whose microbatches take some 10 ms each, until they may hurry to their end."""

    def __init__(self, jobs: Jobs, references: References, folder: Path) -> None:
        self._jobs = jobs
        self._references = references
        self._hurry = folder / "hurry"

    def start(self, *options: str, workers: int) -> Job:
        arguments = ("--steps", str(STEPS), "--slow-until", str(self._hurry))
        job = self._jobs.start(TRAIN, *arguments, workers=workers, options=options, environment=REPLACE)
        job.reach_step(5)
        return job

    def finish(self, job: Job, *, lost: int) -> Result:
        self._hurry.touch()
        result = job.wait()
        result.assert_exact(self._references.digest("--steps", str(STEPS), workers=1), faults=lost, steps=STEPS)
        return result


@pytest.fixture
def slowed(jobs: Jobs, references: References, tmp_path: Path) -> Slowed:
    return Slowed(jobs, references, tmp_path)


def told(job: Job, event: str, worker: str, number: int = 1) -> dict[str, Any]:
    """Wait for the so many-th event of a kind about a worker, and return it: on a busy machine others are slow at times, too."""

    def found() -> dict[str, Any] | None:
        lines = [line for line in job.journal() if line.get("event") == event and line["worker_id"] == worker]
        assert job.process.poll() is None, f"the job ended before {event}"
        return lines[number - 1] if len(lines) >= number else None

    return wait_for(found, f"{event} number {number}")


def shares(job: Job, worker: str = "w0") -> dict[str, int]:
    """How many microbatches each worker has in the newest step that ``worker`` committed."""
    *_, last = read_lines(job.run_dir / "workers" / worker / "steps.jsonl")
    owners = list(last["plan"].values())
    return {owner: owners.count(owner) for owner in owners}


def test_others_take_over_from_a_slow_worker_also_when_one_of_them_is_lost_and_replaced_P1_P2_P3(
    slowed: Slowed,
) -> None:
    job = slowed.start(workers=4)
    with CpuThrottle(job.pids()["w1"]):
        found = told(job, "StragglerFound", "w1")
        wait_for(lambda: shares(job).get("w1") == 1, "most of its microbatches are others'")
        assert sum(shares(job).values()) == 8
        # All begin anew in another generation, those who join included, and find it again.
        job.kill("w2")
        again = told(job, "StragglerFound", "w1", 2)
        assert again["generation"] > found["generation"]
        wait_for(lambda: "w4" in job.committing(), "another one has joined")
        wait_for(lambda: len(shares(job)) == 4 and shares(job).get("w1") == 1, "all four know that it is slow")
        assert all(each["ratio"] > 1.5 and each["own_ms"] > each["others_ms"] for each in (found, again))
        assert _microbatch_seconds(job, "w1") > 1.5 * _microbatch_seconds(job, "w0")
    told(job, "StragglerGone", "w1")
    wait_for(lambda: set(shares(job).values()) == {2}, "it has its share back")
    slowed.finish(job, lost=1)


@pytest.mark.long
def test_a_slow_worker_can_be_made_to_leave_and_a_spare_takes_its_place_P1(slowed: Slowed) -> None:
    job = slowed.start("--on-straggler", "drain", "--spares", "1", workers=3)
    with CpuThrottle(job.pids()["w1"]):
        told(job, "WorkerLeft", "w1")
    wait_for(lambda: "w3" in job.committing(), "the spare has its place")
    result = slowed.finish(job, lost=0)
    drain = next(line for line in result.run.journal if line.get("action") == "Drain")
    assert drain["worker_id"] == "w1" and "is slow: a microbatch takes" in drain["reason"]


def test_a_slow_worker_is_only_told_of_where_that_is_all_that_is_wanted_P1(slowed: Slowed) -> None:
    job = slowed.start("--on-straggler", "report", workers=2)
    with CpuThrottle(job.pids()["w0"]):
        told(job, "StragglerFound", "w0")
        job.reach_step(job.steps() + 5)
    assert shares(job) == {"w0": 4, "w1": 4}
    slowed.finish(job, lost=0)


def _microbatch_seconds(job: Job, worker: str) -> float:
    """What a scraper would see."""
    run = RunDir(job.run_dir)
    request = urllib.request.Request(f"{run.read_address()}/metrics", headers=bearer(read_token(run.token)))
    with urllib.request.urlopen(request, timeout=10) as response:
        lines = response.read().decode().splitlines()
    (line,) = [each for each in lines if each.startswith(f'craft_worker_microbatch_seconds{{worker_id="{worker}"}} ')]
    return float(line.split()[-1])
