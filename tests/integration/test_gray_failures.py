"""Parts of a job that are slow or half there: training goes on meanwhile, and nothing is lost when they recover."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.frozen_disk import frozen, mounted

from craft.agent.linux import procfs
from craft.control.respawn import ANSWER_LIMIT_S
from craft.protocol.errors import Unreachable
from craft.testing.cpu_throttle import CpuThrottle

from .jobs import TRAIN, Job, Jobs, References, describe, wait_for

STEPS = ("--steps", "200")
REPLACED = {"CRAFT_MAX_RESTARTS": "20"}


def step_of(job: Job) -> int:
    return int(job.client.get_status()["step"])


def gets_on(job: Job, steps: int, what: str) -> None:
    """Wait until so many more steps are committed, as the lighthouse hears it."""
    begin = step_of(job)
    wait_for(lambda: step_of(job) >= begin + steps, what, 20)


def ask(job: Job) -> None:
    """Report a failure; the lighthouse may answer late, or not any more."""
    with contextlib.suppress(Unreachable):
        job.client.report_failure(worker_id="w1", reason="a test says so")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk") as place:
        yield place


def test_a_disk_that_hangs_stops_no_step_and_a_loss_is_answered_when_it_thaws_P1_P4(
    jobs: Jobs, references: References, disk: Path
) -> None:
    """The lighthouse waits for it, since a generation must be durable; nobody takes it for one that hangs."""
    go = disk.parent / "go"
    options = ("--dir", str(disk / "run"))
    job = jobs.start(TRAIN, *STEPS, "--slow-until", str(go), workers=3, options=options, environment=REPLACED)
    job.run_dir = disk / "run"
    job.reach_step(3)
    lighthouse = job.client.get_status()["lighthouse"]["pid"]
    with frozen(disk):
        gets_on(job, 20, "training goes on")
        # Not killed: a process of which one thread waits for a disk is not gone before that answers.
        asking = threading.Thread(target=ask, args=(job,))
        asking.start()
        wait_for(lambda: procfs.state(lighthouse) == "D", "the lighthouse waits for the disk")
        time.sleep(ANSWER_LIMIT_S + 1.0)
    asking.join(20.0)
    wait_for(lambda: len(job.committing()) > 3, "another worker takes part")
    assert job.client.get_status()["lighthouse"]["pid"] == lighthouse
    go.touch()
    result = job.wait()
    result.assert_exact(references.digest(*STEPS, workers=3), faults=1, steps=200)


@pytest.mark.parametrize("stopped_s", [3.0, pytest.param(30.0, marks=pytest.mark.long)])
def test_a_slow_lighthouse_and_a_stopped_agent_stop_no_step_P1_P4(
    jobs: Jobs, references: References, tmp_path: Path, stopped_s: float
) -> None:
    """And a worker that is lost afterwards is replaced as ever."""
    go = tmp_path / "go"
    job = jobs.start(TRAIN, *STEPS, "--slow-until", str(go), workers=3, environment=REPLACED)
    job.reach_step(3)
    # It runs for a twentieth of the time, and is never stopped for as long as its keeper would mind.
    with CpuThrottle(job.client.get_status()["lighthouse"]["pid"], stopped_s=0.6, running_s=0.03):
        job.reach_step(job.steps() + 10)
        job.process.send_signal(signal.SIGSTOP)
        began, steps = time.monotonic(), job.steps()
        try:
            wait_for(lambda: job.steps() >= steps + 10, "training goes on without them")
            time.sleep(max(0.0, began + stopped_s - time.monotonic()))
        finally:
            job.process.send_signal(signal.SIGCONT)
    assert job.members() == ["w0", "w1", "w2"], "nobody was taken for lost"
    job.kill("w1")
    wait_for(lambda: len(job.committing()) > 3, "another worker takes part")
    go.touch()
    result = job.wait()
    result.assert_exact(references.digest(*STEPS, workers=3), faults=1, steps=200)
    assert len(result.events("LighthouseStarted")) == 1, describe(result)
