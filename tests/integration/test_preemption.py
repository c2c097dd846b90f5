"""Jobs that are told to make room: they take a checkpoint, end with exit code 75, and go on later with the same bits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from craft.protocol.errors import ConfigError
from craft.testing import Fault

from .jobs import TRAIN, Job, Jobs, References, Result, describe, wait_for
from .scene import Scene

STEPS = ("--steps", "120")
LONG = ("--steps", "100000")


class Pausing:
    """Runs of one job, one after the other, each from where the one before it made room."""

    def __init__(self, jobs: Jobs, folder: Path) -> None:
        self._jobs = jobs
        self._fast = folder / "fast"
        self.store = folder / "store"
        self.file = folder / "room"

    def start(self, *faults: Fault, environment: dict[str, str] | None = None, workers: int = 2) -> Job:
        """Slow steps, so that there is time to interrupt them; returns when some were committed."""
        job = self._jobs.start(
            TRAIN, *STEPS, "--slow-until", str(self._fast),
            workers=workers, faults=faults, options=self._options, environment=environment,
        )  # fmt: skip
        job.reach_step(3)
        return job

    def finish(self, workers: int = 2) -> Result:
        """The last run, at full speed."""
        self._fast.touch()
        return self._jobs.run(TRAIN, *STEPS, "--slow-until", str(self._fast), workers=workers, options=self._options)

    @property
    def _options(self) -> tuple[str, ...]:
        often = ("--checkpoint-every", "1 h", "--preempt-file", str(self.file))
        return ("--checkpoints", str(self.store), *often, "--resume")


@pytest.fixture
def pausing(jobs: Jobs, tmp_path: Path) -> Pausing:
    return Pausing(jobs, tmp_path)


def preempted(result: Result, reason: str) -> int:
    """The step of the checkpoint that a job which made room says to have taken."""
    assert result.exit_code == 75, describe(result)
    (written,) = result.events("CheckpointWritten")
    step = int(written["step"])
    said = f"ended with exit code 75: preempted ({reason}): checkpoint of step {step} is complete, go on with --resume"
    assert said in result.output, describe(result)
    assert f"newest checkpoint: step {step} (" in result.output
    assert "Traceback" not in describe(result)
    # Nothing was computed that is not in it.
    assert max(commit.step for commits in result.run.commits.values() for commit in commits) == step - 1
    return step


def by_sigterm(pausing: Pausing, job: Job) -> str:
    job.process.terminate()
    return "SIGTERM"


def by_file(pausing: Pausing, job: Job) -> str:
    pausing.file.write_text("60\n")
    return f"the file {pausing.file} appeared"


def by_post(pausing: Pausing, job: Job) -> str:
    answer = job.client.preempt("a spot instance", deadline_s=60)
    assert answer["actions"][0]["action"] == "Preempt"
    return "a spot instance"


def test_a_job_that_makes_room_for_any_reason_goes_on_with_the_same_bits_P1_P7(
    pausing: Pausing, references: References
) -> None:
    ways: list[Callable[[Pausing, Job], str]] = [by_sigterm, by_file, by_post]
    steps = []
    for way in ways:
        job = pausing.start()
        reason = way(pausing, job)
        steps.append(preempted(job.wait(), reason))
    # The file is still there: it has had its effect.
    result = pausing.finish(workers=3)
    result.assert_exact(references.digest(*STEPS, workers=2), faults=0)
    assert steps == sorted(set(steps))
    assert result.events("CheckpointRestored")[0]["step"] == steps[-1]


def test_workers_and_lighthouses_that_are_killed_meanwhile_change_nothing_P1_P4_P7(
    pausing: Pausing, references: References
) -> None:
    # A worker dies when its share is copied and not yet written: the others take another checkpoint.
    job = pausing.start(Fault(point="saved", rank=1), workers=3, environment={"CRAFT_MAX_RESTARTS": "5"})
    job.process.terminate()
    result = job.wait()
    first = preempted(result, "SIGTERM")
    assert result.struck == {0: "w1"}
    assert len(result.events("CheckpointAbandoned")) == 1
    assert {line["member"]["worker_id"] for line in result.events("WorkerJoined")} == {"w0", "w1", "w2"}

    # The lighthouse dies after it told everybody; nobody comes to the boundary before there is another one.
    job = pausing.start(Fault(point="update", kind="sleep", seconds=4.0, rank=0, after_file="asked"))
    (job.run_dir / "asked").touch()
    wait_for(lambda: (job.run_dir / "struck" / "0").exists(), "a step takes long")
    job.process.terminate()
    wait_for(lambda: any(line.get("action") == "Preempt" for line in job.journal()), "the lighthouse was asked")
    os.kill(job.client.get_status()["lighthouse"]["pid"], signal.SIGKILL)
    result = job.wait()
    assert preempted(result, "SIGTERM") > first
    assert [line["restarted"] for line in result.events("LighthouseStarted")] == [False, True]
    assert len(result.events("PreemptRequested")) == 1

    pausing.finish().assert_exact(references.digest(*STEPS, workers=2), faults=0)


@pytest.mark.long
def test_a_job_of_several_hosts_that_all_get_sigterm_is_saved_P7(scene: Scene, jobs: Jobs, tmp_path: Path) -> None:
    scene.light(workers=2)
    address = ("--lighthouse", scene.run.read_address(), "--token-file", str(scene.run.token))
    options = (*address, "--checkpoints", str(tmp_path / "store"), "--checkpoint-every", "1 h")
    hosts = [
        jobs.start(TRAIN, *LONG, workers=1, options=options, environment={"CRAFT_HOST": name}) for name in ("h1", "h2")
    ]
    wait_for(lambda: scene.client.get_status()["step"] >= 3, "some steps are committed")
    for job in hosts:
        job.process.terminate()
    results = [job.wait() for job in hosts]
    last = scene.client.get_status()["checkpoints"]["last"]
    assert [result.exit_code for result in results] == [75, 75], "".join(map(describe, results))
    # One of them may have left before the other one was told.
    said = "".join(result.output for result in results)
    assert f"checkpoint of step {last['step']} is complete, go on with --resume" in said
    assert f"newest checkpoint: step {last['step']} (" in said


# When there is no time.


STUCK = Fault(point="update", kind="sleep", seconds=60.0, rank=0, after_file="stuck")


def start_stuck(jobs: Jobs, store: Path) -> Job:
    """A job that does not come to its next step boundary, and has taken checkpoints before."""
    options = ("--checkpoints", str(store), "--checkpoint-every", "3 steps")
    job = jobs.start(TRAIN, *LONG, workers=2, options=options, faults=[STUCK])
    wait_for(
        lambda: any(line.get("event") == "CheckpointWritten" for line in job.journal()), "a checkpoint is complete"
    )
    (job.run_dir / "stuck").touch()
    wait_for(lambda: (job.run_dir / "struck" / "0").exists(), "a step takes long")
    return job


def test_at_the_deadline_a_job_ends_with_what_it_has(jobs: Jobs, tmp_path: Path) -> None:
    job = start_stuck(jobs, tmp_path / "store")
    began = time.monotonic()
    job.client.preempt("a spot instance", deadline_s=1.0)
    result = job.wait()
    assert result.exit_code == 75, describe(result)
    newest = result.events("CheckpointWritten")[-1]["step"]
    assert "preempted (a spot instance), and some workers were still there at the deadline" in result.output
    assert f"the newest checkpoint is that of step {newest}, go on with --resume" in result.output
    assert 1.0 <= time.monotonic() - began < 10.0


def test_a_second_sigterm_ends_a_job_at_once(jobs: Jobs, tmp_path: Path) -> None:
    job = start_stuck(jobs, tmp_path / "store")
    job.process.terminate()
    wait_for(lambda: any(line.get("action") == "Preempt" for line in job.journal()), "the lighthouse was asked")
    assert job.process.poll() is None
    began = time.monotonic()
    job.process.terminate()
    result = job.wait()
    assert (result.exit_code, time.monotonic() - began < 10.0) == (143, True), describe(result)


# Jobs that take no checkpoints.


def test_a_job_without_checkpoints_refuses_an_order_and_ends_when_the_file_appears(jobs: Jobs, tmp_path: Path) -> None:
    file = tmp_path / "room"
    job = jobs.start(TRAIN, *LONG, workers=2, options=("--preempt-file", str(file)))
    job.reach_step(3)
    with pytest.raises(ConfigError, match="no worker takes checkpoints"):
        job.client.preempt("a spot instance")
    with pytest.raises(ConfigError, match="no worker takes checkpoints"):
        job.client.checkpoint("asked")
    file.touch()
    result = job.wait()
    assert result.exit_code == 143, describe(result)
    assert f"the file {file} appeared, and the job takes no checkpoints" in result.output
