"""``craft chaos`` on real jobs: every kind of fault, and the job ends with the bits of an undisturbed one (P1 to P3)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from craft.settings.rundir import RunDir
from craft.testing import liveness

from .jobs import CRAFT, TRAIN, Job, Jobs, References, Result, describe, wait_for

STEPS = 150
QUICK = {"CRAFT_MAX_RESTARTS": "50", "CRAFT_HANG_LIMIT_S": "2", "CRAFT_FIRST_STEP_LIMIT_S": "30"}


def chaos(job: Job, *options: str) -> subprocess.CompletedProcess[str]:
    """Run ``craft chaos`` on a job to its end."""
    command = [*CRAFT, "chaos", "--dir", str(job.run_dir), *options]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=80)


def assert_live(result: Result) -> None:
    """The job never stood still for a reason that its journal does not give."""
    report = liveness.check(result.run_dir, exit_code=0)
    assert report.violations == (), "\n".join(report.violations) + describe(result)


class Tormented:
    """Runs a job that goes slowly until chaos is through with it."""

    def __init__(self, jobs: Jobs, references: References, folder: Path) -> None:
        self._jobs = jobs
        self._references = references
        self._hurry = folder / "hurry"

    def start(self, *options: str, workers: int = 3, steps: int = STEPS) -> Job:
        arguments = ("--steps", str(steps), "--slow-until", str(self._hurry))
        job = self._jobs.start(TRAIN, *arguments, workers=workers, options=options, environment=QUICK)
        job.reach_step(5)
        return job

    def finish(self, job: Job, *, lost: int, joined: int = 0) -> Result:
        """Wait until so many have come in the place of others and committed, then let the job end, exact."""
        wait_for(
            lambda: len(job.committing()) >= 3 + joined or job.process.poll() is not None, f"{joined} joined and commit"
        )
        self._hurry.touch()
        result = job.wait()
        reference = self._references.digest("--steps", str(STEPS), workers=1)
        result.assert_exact(reference, faults=lost, steps=STEPS)
        assert_live(result)
        return result


@pytest.fixture
def tormented(jobs: Jobs, references: References, tmp_path: Path) -> Tormented:
    return Tormented(jobs, references, tmp_path)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("kill", "killed by SIGKILL"),
        # Those that are long are faults of test_hangs.py and test_exactness.py, too.
        pytest.param("stop", "stopped by a signal", marks=pytest.mark.long),
        pytest.param("hang", "computing microbatch", marks=pytest.mark.long),
        pytest.param("raise", "InjectedError: an error was injected into step", marks=pytest.mark.long),
    ],
)
def test_a_fault_that_costs_a_worker_is_carried_out_once_and_recovered_from_P1(
    tormented: Tormented, kind: str, words: str
) -> None:
    job = tormented.start("--chaos")
    done = chaos(job, "--schedule", f"1s:{kind} w1")
    assert done.returncode == 0, done
    assert f"{kind}  " in done.stdout and "w1" in done.stdout and "1 faults in" in done.stdout
    result = tormented.finish(job, lost=1, joined=1)
    (fault,) = [line for line in result.run.journal if line.get("outcome") == "Fault"]
    assert fault["worker_ids"] == ["w1"] and words in fault["reason"], fault
    (injected,) = result.events("FaultInjected")
    assert (injected["fault"], injected["worker_id"]) == (kind, "w1")


def test_a_slow_worker_is_slow_for_a_while_and_lost_by_nobody_P1(tormented: Tormented) -> None:
    job = tormented.start("--chaos")
    assert chaos(job, "--schedule", "1s:slow w1", "--slow-by", "50ms", "--slow-for", "1s").returncode == 0
    wait_for(lambda: "slow in step" in RunDir(job.run_dir).log("w1").read_text(), "it is slow")
    tormented.finish(job, lost=0)


def test_a_connection_that_is_cut_makes_the_same_members_meet_again_P1(tormented: Tormented) -> None:
    job = tormented.start("--chaos")
    assert chaos(job, "--schedule", "1s:cut w1").returncode == 0
    wait_for(
        lambda: len([line for line in job.journal() if line.get("action") == "Reconfigure"]) > 1, "they meet again"
    )
    result = tormented.finish(job, lost=0)
    second = [line for line in result.run.journal if line.get("action") == "Reconfigure"][1]
    assert second["members"] == ["w0", "w1", "w2"]
    assert "a connection is cut" in RunDir(job.run_dir).log("w1").read_text()


def test_a_drained_worker_leaves_in_order_P1(tormented: Tormented) -> None:
    job = tormented.start("--chaos")
    assert chaos(job, "--schedule", "1s:drain w1").returncode == 0
    wait_for(lambda: "w1" not in job.pids(), "it has left")
    result = tormented.finish(job, lost=0)
    assert [line["worker_id"] for line in result.events("WorkerLeft")] == ["w1"]


def test_a_killed_lighthouse_answers_first_and_is_followed_by_another_P1_P4(tormented: Tormented) -> None:
    job = tormented.start("--chaos")
    before = job.client.get_status()["lighthouse"]["pid"]
    done = chaos(job, "--schedule", "1s:kill-lighthouse, 2s:kill-lighthouse")
    assert done.returncode == 0 and "2 faults" in done.stdout, done
    wait_for(lambda: not psutil.pid_exists(before), "it is dead")
    result = tormented.finish(job, lost=0)
    assert [line["fault"] for line in result.events("FaultInjected")] == ["kill-lighthouse"] * 2
    assert len(result.events("LighthouseStarted")) == 3


def test_a_worker_that_goes_through_many_generations_keeps_nothing_of_the_old_ones(tormented: Tormented) -> None:
    job = tormented.start("--chaos", steps=10_000)
    first = used(job)
    for _ in range(10):
        reached = job.client.get_status()
        job.client.inject("cut", worker_id="w0")
        wait_for(lambda before=reached: gone_on(job, before), "the same members meet again and go on")  # type: ignore[misc]

    def small() -> bool:
        # One group may be on its way in or out; each has a thread and four file descriptors, and connections.
        return all(now <= before + 6 for before, now in zip(first, used(job), strict=True))

    wait_for(small, f"file descriptors and threads are as few as before, {first}, not {used(job)}", 10)
    job.client.stop()
    assert job.wait().exit_code == 0


def gone_on(job: Job, before: dict[str, Any]) -> bool:
    now = job.client.get_status()
    return bool(now["generation"] > before["generation"] and now["settled"] and now["step"] > before["step"])


def used(job: Job) -> list[int]:
    """File descriptors and threads of each worker."""
    processes = [psutil.Process(pid) for pid in job.pids().values()]
    return [number for each in processes for number in (each.num_fds(), each.num_threads())]


def test_random_faults_of_every_kind_change_no_bit_P1(jobs: Jobs, references: References, tmp_path: Path) -> None:
    hurry = tmp_path / "hurry"
    arguments = ("--steps", "400", "--slow-until", str(hurry))
    job = jobs.start(TRAIN, *arguments, workers=3, options=("--chaos", "--spares", "1"), environment=QUICK)
    job.reach_step(5)
    done = chaos(job, "--every", "1s", "--for", "12s", "--seed", "5")
    assert done.returncode == 0, done
    hurry.touch()
    result = job.wait()
    assert result.exit_code == 0, describe(result) + done.stdout
    lost = {worker for line in result.run.journal if line.get("outcome") == "Fault" for worker in line["worker_ids"]}
    result.assert_exact(references.digest("--steps", "400", workers=1), faults=len(lost), steps=400)
    assert_live(result)
    assert len(result.events("FaultInjected")) >= 3


def test_a_job_that_was_not_started_for_chaos_is_left_alone_without_a_yes(tormented: Tormented) -> None:
    job = tormented.start()
    assert job.client.get_status()["chaos"] is False
    refused = chaos(job, "--schedule", "0s:kill w1")
    assert refused.returncode == 2
    assert "not started for chaos" in refused.stderr
    done = chaos(job, "--schedule", "0s:kill w1", "--yes")
    assert done.returncode == 0, done
    tormented.finish(job, lost=1, joined=1)


def test_on_a_terminal_it_asks_and_takes_no_for_an_answer(tormented: Tormented) -> None:
    job = tormented.start()
    ours, theirs = os.openpty()
    command = [*CRAFT, "chaos", "--dir", str(job.run_dir), "--schedule", "0s:kill w1"]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        os.write(ours, b"n\n")
        said, _ = process.communicate(timeout=30)
    os.close(theirs)
    os.close(ours)
    assert process.returncode == 2
    assert b"this job was not started for chaos: go on?" in said
    assert tormented.finish(job, lost=0).events("FaultInjected") == []


def test_bad_input_is_a_sentence_and_exit_code_2(tormented: Tormented) -> None:
    job = tormented.start("--chaos")
    for options in (
        ("--kinds", "melt"), ("--every", "soon"), ("--schedule", "kill"), ("--every", "0s"), ("--for", "ever"),
    ):  # fmt: skip
        done = chaos(job, *options)
        assert done.returncode == 2, options
        assert done.stderr.startswith("craft: ") and len(done.stderr.splitlines()) == 1, options
    tormented.finish(job, lost=0)


def test_the_last_worker_with_the_state_is_not_killed(tormented: Tormented) -> None:
    """Alone it is refused from the beginning; a schedule leaves the fault out, and says why."""
    job = tormented.start("--chaos", workers=1, steps=10_000)
    refused = chaos(job, "--kinds", "kill")
    assert refused.returncode == 2 and "would not survive" in refused.stderr, refused
    left_out = chaos(job, "--schedule", "0s:kill w0")
    assert left_out.returncode == 0 and "left out: no other worker has" in left_out.stdout, left_out
    job.client.stop()
    assert job.wait().exit_code == 0
