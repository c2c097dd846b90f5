"""Jobs that lose every worker at once, and begin again by themselves with the same bits (P1 to P3)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from craft.testing import Fault
from craft.testing.history import check

from .jobs import TRAIN, Job, Jobs, References, Result, describe, wait_for
from .scene import Scene

STEPS = ("--steps", "60")
REPLACE = {"CRAFT_MAX_RESTARTS": "100"}


def start(jobs: Jobs, folder: Path, *more: str, workers: int = 2, **rest: Any) -> Job:
    """A job that goes slowly until there is a file ``hurry``, and takes a checkpoint every 10 steps."""
    options = ("--checkpoints", str(folder / "store"), "--checkpoint-every", "10 steps", *more)
    environment = {**REPLACE, **rest.pop("environment", {})}
    return jobs.start(
        TRAIN, *STEPS, "--slow-until", str(folder / "hurry"),
        workers=workers, options=options, environment=environment, **rest,
    )  # fmt: skip


def commits(job: Job, branch: int, step: int) -> None:
    """Wait until this step is committed in this branch, and some checkpoint is complete."""

    def there() -> bool:
        assert job.process.poll() is None, "ended too early" + describe(job._result())
        lines = [line for commits in job._result().run.commits.values() for line in commits]
        return any((line.branch, line.step) >= (branch, step) for line in lines)

    wait_for(there, f"step {step} of branch {branch} is committed")
    wait_for(
        lambda: [line for line in job.journal() if line.get("event") == "CheckpointWritten"], "a checkpoint is there"
    )


def living(job: Job) -> list[str]:
    return sorted(set(job.members()) & set(job.pids()))


def restored(result: Result) -> list[tuple[int, int]]:
    """(branch, step) from which the job began again, each time."""
    return [(line["branch"], line["step"]) for line in result.run.journal if line.get("action") == "Restore"]


def test_a_job_that_loses_all_workers_twice_and_its_lighthouse_ends_with_the_same_bits_P1_P2_P3(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    job = start(jobs, tmp_path)
    commits(job, 0, 14)
    job.kill(*living(job))
    commits(job, 1, 17)
    # This time nobody is there to hear of it: the next lighthouse is told by the agent.
    lighthouse = job.client.get_status()["lighthouse"]["pid"]
    workers = living(job)
    os.kill(lighthouse, signal.SIGSTOP)
    job.kill(*workers)
    os.kill(lighthouse, signal.SIGKILL)
    commits(job, 2, 20)
    (tmp_path / "hurry").touch()
    result = job.wait()

    result.assert_exact(references.digest(*STEPS), faults=4, steps=60)
    (first, second) = restored(result)
    assert first[0] == 1 and first[1] >= 10 and first[1] % 10 == 0, describe(result)
    assert second[0] == 2 and second[1] >= first[1], describe(result)
    assert "no worker is left: begins again from the checkpoint of step" in result.output
    assert [line["restarted"] for line in result.events("LighthouseStarted")] == [False, True]


def test_a_job_whose_fork_server_is_killed_goes_on_from_another_one_P1_P2_P3(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    job = start(jobs, tmp_path)
    commits(job, 0, 14)
    first = job.helper("craft.agent.linux.forkserver")
    first.kill()
    commits(job, 1, 0)
    assert job.helper("craft.agent.linux.forkserver").pid != first.pid
    job.wait_for_committing(4)
    # What takes the place of a lost worker comes from the new one, too.
    victim = living(job)[-1]
    job.kill(victim)
    job.wait_for_committing(5)
    (tmp_path / "hurry").touch()

    result = job.wait()

    result.assert_exact(references.digest(*STEPS), faults=3, steps=60)
    lost = {line["worker_id"]: line["reason"] for line in result.events("WorkerLost")}
    assert lost == {
        "w0": "killed by SIGKILL with the fork server of its host",
        "w1": "killed by SIGKILL with the fork server of its host",
        victim: "killed by SIGKILL",
    }


def test_a_job_that_begins_again_in_vain_stops_and_says_so(jobs: Jobs, tmp_path: Path) -> None:
    """Every worker that is started in the place of a lost one dies before its first step."""
    faults = [Fault(point="update", worker="w0", after_file="saved")]
    faults += [Fault(point="verified", worker=f"w{number}") for number in range(1, 4)]
    job = start(jobs, tmp_path, workers=1, faults=faults)
    commits(job, 0, 10)
    (job.run_dir / "saved").touch()
    result = job.wait()
    assert result.exit_code == 3, describe(result)
    # Of step 10, unless the test was so slow that there was another one.
    step = restored(result)[0][1]
    assert step % 10 == 0 and restored(result) == [(1, step), (2, step), (3, step)], describe(result)
    assert f"the job began 3 times from the checkpoint of step {step} and " in result.output


@pytest.mark.long
def test_a_job_that_is_lost_at_the_same_step_each_time_stops_and_says_so(jobs: Jobs, tmp_path: Path) -> None:
    """Each beginning commits some steps, and none that had not been there."""
    faults = [Fault(point="update", step=19, worker=f"w{number}") for number in range(12)]
    result = start(jobs, tmp_path, workers=1, faults=faults).wait()
    assert result.exit_code == 3, describe(result)
    assert {step for _, step in restored(result)} == {10} and len(restored(result)) < 12, describe(result)
    assert "the job began 3 times from the checkpoint of step 10 and came no further than before" in result.output


@pytest.mark.long
def test_steps_that_give_something_else_when_they_are_computed_again_end_the_job_P1(jobs: Jobs, tmp_path: Path) -> None:
    """All workers lack what was changed before the checkpoint and is not in it, so that none differs from the others."""
    options = ("--checkpoints", str(tmp_path / "store"), "--checkpoint-every", "10 steps")
    job = jobs.start(
        TRAIN, *STEPS, "--drift-at", "5", "--slow-until", str(tmp_path / "hurry"),
        workers=2, options=options, environment=REPLACE,
    )  # fmt: skip
    commits(job, 0, 14)
    job.kill(*living(job))
    result = job.wait()

    assert result.exit_code == 1, describe(result)
    assert "was computed again after the job began again from a checkpoint, and gave loss" in result.output
    assert "Register it (job.register, job.register_state)" in result.output


def test_what_is_lost_while_a_job_begins_again_is_replaced_like_any_other_P1_P3(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    faults = [Fault(point="verified", worker="w2"), Fault(point="update", step=25, worker="w3")]
    job = start(jobs, tmp_path, faults=faults)
    commits(job, 0, 14)
    job.kill(*living(job))
    commits(job, 1, 30)
    (tmp_path / "hurry").touch()
    result = job.wait()
    result.assert_exact(references.digest(*STEPS), faults=4, steps=60)
    assert len(result.struck) == 2


@pytest.mark.long
@pytest.mark.parametrize("restarts", ["0", "1"])
def test_without_anybody_who_could_begin_again_a_job_is_given_up(jobs: Jobs, tmp_path: Path, restarts: str) -> None:
    job = start(jobs, tmp_path, environment={"CRAFT_MAX_RESTARTS": restarts})
    commits(job, 0, 12)
    job.kill(*living(job))
    result = job.wait()
    assert result.exit_code == 3, describe(result)


@pytest.mark.long
def test_an_exception_in_the_same_place_is_a_bug_also_after_a_job_began_again(jobs: Jobs, tmp_path: Path) -> None:
    faults = [
        Fault(point="update", step=14, kind="raise", worker="w0"),
        Fault(point="update", step=14, kind="raise", worker="w2"),
    ]
    job = start(jobs, tmp_path, faults=faults)
    wait_for(lambda: (job.run_dir / "struck" / "0").exists(), "the first one failed")
    job.kill(*(each for each in living(job) if each != "w0"))
    result = job.wait()
    assert result.exit_code == 1, describe(result)


@pytest.mark.long
def test_spares_begin_again_at_once_P1(jobs: Jobs, references: References, tmp_path: Path) -> None:
    job = start(jobs, tmp_path, "--spares", "2")
    commits(job, 0, 14)
    wait_for(lambda: len(job.pids()) == 4, "the spares are there")
    job.kill("w0", "w1")
    commits(job, 1, 22)
    (tmp_path / "hurry").touch()
    result = job.wait()
    result.assert_exact(references.digest(*STEPS), faults=2, steps=60)


@pytest.mark.long
def test_a_job_of_two_hosts_that_loses_all_workers_begins_again_on_both_P1_P3(
    scene: Scene, jobs: Jobs, references: References, tmp_path: Path
) -> None:
    scene.light(workers=2)
    address = ("--lighthouse", scene.run.read_address(), "--token-file", str(scene.run.token))
    hosts = [start(jobs, tmp_path, *address, workers=1, environment={"CRAFT_HOST": name}) for name in ("h1", "h2")]
    wait_for(lambda: scene.client.get_status()["step"] >= 14, "some steps are committed")
    wait_for(lambda: scene.client.get_status()["checkpoints"]["last"], "a checkpoint is complete")
    pids = [each["pid"] for each in scene.client.get_status()["workers"] if each["state"] == "member"]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)
    wait_for(lambda: scene.client.get_status()["generation"] > 2, "a generation was made")
    (tmp_path / "hurry").touch()
    results = [job.wait() for job in hosts]
    assert [result.exit_code for result in results] == [0, 0], "".join(map(describe, results))
    report = check(scene.run.path, references.digest(*STEPS), [job.run_dir for job in hosts])
    assert report.violations == ()
    assert report.steps == 60
