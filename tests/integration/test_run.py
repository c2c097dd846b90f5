"""``craft run`` as a person meets it: what it refuses, how it ends, what it says, and what it leaves behind (nothing)."""

from __future__ import annotations

import functools
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.small_disk import fill, mounted

from craft.testing import Fault
from craft.wire.auth import make_token, write_token

from .jobs import CRAFT, LIMIT_S, TRAIN, Job, Jobs, References, Result, describe, wait_for

LONG = ("--steps", "100000")
"""More steps than any test waits for."""


def craft(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that is to answer at once."""
    return subprocess.run([*CRAFT, *arguments], cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S)


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


@pytest.fixture
def running(jobs: Jobs) -> Job:
    """A job of two workers in the middle of its training."""
    return start_long(jobs)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job like ``running``, of tests that only look at it."""
    jobs = Jobs(tmp_path_factory.mktemp("watched"))
    yield start_long(jobs)
    jobs.end()


def start_long(jobs: Jobs) -> Job:
    job = jobs.start(TRAIN, *LONG, workers=2)
    job.reach_step(3)
    return job


# What is refused: one sentence on standard error, exit code 2, and nothing was started.


def refused(folder: Path, *arguments: str) -> str:
    """What ``craft run`` says when it refuses to run."""
    done = craft("run", *arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (2, ""), done.stdout + done.stderr
    assert done.stderr.startswith("craft run: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_an_unknown_script_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    assert "there is no script nowhere.py" in refused(tmp_path, "--dir", "run", "nowhere.py")
    assert list(tmp_path.iterdir()) == []


def test_zero_workers_are_refused(tmp_path: Path) -> None:
    assert "at least 1 worker" in refused(tmp_path, "--workers", "0", "--dir", "run", str(TRAIN))
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_setting_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    (tmp_path / "craft.toml").write_text("[run]\nworker = 4\n")
    message = refused(tmp_path, "--config", "craft.toml", "--dir", "run", str(TRAIN))
    assert "craft.toml, line 2: [run] has no setting 'worker'; did you mean workers?" in message
    assert not (tmp_path / "run").exists()


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = craft("run", "--port", str(port), "--dir", "run", str(TRAIN), cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith(f"craft run: port {port} of 127.0.0.1 is in use") and done.stderr.count("\n") == 1


def test_the_directory_of_a_running_job_is_refused(tmp_path: Path, watched: Job) -> None:
    assert "belongs to a job that is running" in refused(tmp_path, "--dir", str(watched.run_dir), str(TRAIN))


def test_the_directory_of_an_earlier_job_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "journal.jsonl").write_text("{}\n")
    assert "holds the files of an earlier job" in refused(tmp_path, "--dir", "run", str(TRAIN))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["journal.jsonl"]


def test_a_wrong_token_is_refused_before_anything_is_started(tmp_path: Path, watched: Job) -> None:
    token = tmp_path / "token"
    write_token(token, make_token())
    url = (watched.run_dir / "address").read_text().strip()
    options = ("--lighthouse", url, "--token-file", str(token), "--dir", "run")
    done = craft("run", *options, str(TRAIN), cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr == f"craft run: the lighthouse at {url} does not accept the token in {token}\n"
    assert not list((tmp_path / "run").glob("workers/*"))


def test_a_full_disk_is_refused(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "64k") as disk:
        fill(disk)
        message = refused(tmp_path, "--dir", str(disk / "run"), str(TRAIN))
        assert message == f"craft run: cannot write {disk / 'run' / 'config.toml'}: No space left on device\n"


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("CRAFT_ADDRESS", "300.1.1.1", "is not an address of this host"),
        ("CRAFT_ADDRESS", "192.0.2.7", "is not an address of this host"),
        ("CRAFT_HOST", "", "a host needs a name"),
    ],
)
def test_a_host_that_cannot_be_is_refused_by_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, why: str
) -> None:
    monkeypatch.setenv(variable, value)
    message = refused(tmp_path, "--dir", "run", str(TRAIN))
    assert f"{variable}={value}: " in message and why in message
    assert not (tmp_path / "run").exists()


def test_a_lighthouse_that_is_killed_at_its_start_is_told_as_that(jobs: Jobs, tmp_path: Path) -> None:
    """By itself, as soon as its interpreter runs: from outside it could come too late."""
    killed = "if 'lighthouse' in sys.orig_argv: os.kill(os.getpid(), signal.SIGKILL)\n"
    (tmp_path / "sitecustomize.py").write_text("import os, signal, sys\n" + killed)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    result = jobs.run(TRAIN, workers=1, environment={"PYTHONPATH": path})
    assert result.exit_code == 2
    assert "the lighthouse did not start: killed by SIGKILL" in result.errors, describe(result)


# Who listens.


def test_a_job_goes_on_when_nobody_reads_what_it_says(jobs: Jobs) -> None:
    inside = ("bash", "-o", "pipefail", "-c", '"$@" | head -n 1', "bash")
    result = jobs.run(TRAIN, workers=2, inside=inside)
    assert (result.exit_code, result.output.count("\n")) == (0, 1), describe(result)
    assert "Traceback" not in result.errors
    assert len(result.events("WorkerFinished")) == 2


@pytest.mark.parametrize("command", ["events", "status"])
def test_other_commands_end_quietly_when_nobody_reads(watched: Job, command: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    arguments = [*CRAFT, command, "--dir", str(watched.run_dir)]
    done = subprocess.run(arguments, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


# How a script ends.


def test_a_script_that_never_joins_is_a_bug(jobs: Jobs, tmp_path: Path) -> None:
    result = jobs.run(script(tmp_path, "print('hello')"), workers=2)
    assert result.exit_code == 1, describe(result)
    assert "ended without calling craft.join()" in result.output


def test_a_script_that_leaves_its_loop_early_has_finished(jobs: Jobs, tmp_path: Path) -> None:
    text = """
        import sys
        import torch, craft
        job = craft.join()
        model = job.replicate(torch.nn.Linear(2, 1))
        for step in job.steps(torch.utils.data.TensorDataset(torch.ones(64, 2)), global_batch=8, steps=100):
            for (x,) in step:
                model(x).sum().backward()
            if step.number == 5:
                sys.exit()
    """
    result = jobs.run(script(tmp_path, text), workers=2)
    assert result.exit_code == 0, describe(result)


def test_an_exit_code_of_the_scripts_own_is_a_bug_like_an_exception(jobs: Jobs, tmp_path: Path) -> None:
    result = jobs.run(script(tmp_path, "import sys, craft; craft.join(); sys.exit(7)"), workers=2)
    assert result.exit_code == 1, describe(result)
    assert "SystemExit: 7" in result.output


# How a job is ended from outside.


def assert_all_gone(job: Job, limit_s: float = 15) -> None:
    wait_for(lambda: not job.processes(), "workers, fork server and lighthouse end", limit_s)


def assert_interrupted(result: Result, code: int, name: str) -> None:
    assert result.exit_code == code, describe(result)
    assert f"interrupted by {name}" in result.output
    # Whoever was ended because of it was not lost.
    assert not [line for line in result.run.journal if line.get("outcome") == "Fault"], describe(result)
    assert "Traceback" not in describe(result)


def test_ctrl_c_ends_a_job_with_everything_it_started(running: Job) -> None:
    running.interrupt()
    assert_interrupted(running.wait(), 130, "SIGINT")


@pytest.mark.long
def test_ctrl_c_ends_a_job_whose_lighthouse_is_stopped(running: Job) -> None:
    for process in running.processes():
        if "craft.cli.main lighthouse" in " ".join(process.cmdline()):
            process.suspend()
    running.interrupt()
    assert_interrupted(running.wait(), 130, "SIGINT")


def test_ctrl_c_ends_a_job_that_is_still_starting(jobs: Jobs) -> None:
    job = jobs.start(workers=2)
    maps = Path(f"/proc/{job.helper('craft.agent.linux.forkserver').pid}/maps")
    wait_for(lambda: "libtorch_cpu" in maps.read_text(), "torch is being imported")
    job.interrupt()
    assert_interrupted(job.wait(), 130, "SIGINT")


def test_sigterm_ends_a_job_with_everything_it_started(running: Job) -> None:
    running.process.terminate()
    assert_interrupted(running.wait(), 143, "SIGTERM")


def test_workers_and_lighthouse_do_not_outlive_a_killed_agent(running: Job) -> None:
    assert len(running.processes()) == 5
    running.process.kill()
    running.process.wait()
    assert_all_gone(running)


def test_a_killed_fork_server_ends_a_job_that_starts_no_more_workers_with_a_sentence(running: Job) -> None:
    running.helper("craft.agent.linux.forkserver").kill()
    result = running.wait()
    assert result.exit_code == 3, describe(result)
    assert "with the fork server of its host" in result.output and "no worker is left" in result.output


def test_a_job_gives_up_below_its_minimum_of_workers(jobs: Jobs) -> None:
    faults = [Fault(point="batch", step=3, rank=1)]
    result = jobs.run(TRAIN, *LONG, workers=2, options=["--min-workers", "2"], faults=faults)
    assert result.exit_code == 3, describe(result)
    assert "1 worker is left and --min-workers is 2" in result.output


def test_a_run_directory_that_is_removed_under_a_job_is_named_and_nothing_else_is_blamed(running: Job) -> None:
    victim = running.pids()["w1"]
    shutil.rmtree(running.run_dir)
    said = running.files.with_suffix(".err")
    wait_for(lambda: "was removed or moved away while the job ran. Training goes on" in said.read_text(), "it is told")
    os.kill(victim, signal.SIGKILL)
    result = running.wait()
    assert result.exit_code == 3, describe(result)
    assert f"ended with exit code 3: the run directory {running.run_dir} was removed or moved away" in result.output
    assert "token" not in result.output + result.errors
    assert not running.run_dir.exists()


# What a job says of itself.


def test_the_summary_lists_faults_and_what_they_cost(jobs: Jobs) -> None:
    result = jobs.run(faults=[Fault(point="batch", step=5, rank=1)], workers=3)
    assert result.exit_code == 0, describe(result)
    (victim,) = result.struck.values()
    lines = result.output.splitlines()
    assert any(line.endswith(f"{victim} lost: killed by SIGKILL") for line in lines), result.output
    assert any("10 steps in" in line and "1 fault, goodput" in line for line in lines), result.output
    cost = next(line for line in lines if line.startswith(f"  generation 2: {victim}: "))
    assert cost.endswith(" ms lost, 3 microbatches (12 samples) computed again"), cost


def test_the_status_of_a_job_has_the_documented_shape(running: Job, tmp_path: Path) -> None:
    victim = running.members()[1]
    running.kill(victim)
    wait_for(lambda: len(running.members()) == 1, "a generation without the victim")
    done = craft("status", "--dir", str(running.run_dir), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert isinstance(status["step"], int) and status["step"] >= 3
    assert (status["generation"], status["state"], status["faults"]) == (2, "running", 1)
    assert status["lighthouse"].keys() >= {"pid", "url"}
    workers = {worker["worker_id"]: worker for worker in status["workers"]}
    assert all(worker.keys() >= {"worker_id", "pid", "host", "rank", "state", "step"} for worker in workers.values())
    assert (workers[victim]["rank"], workers[victim]["state"]) == (None, "lost")
    (other,) = workers.keys() - {victim}
    assert (workers[other]["rank"], workers[other]["pid"]) == (0, running.pids()[other])


def has_ended(job: Job, worker: str) -> bool:
    return worker not in job.pids()


def test_a_reported_worker_is_fenced_and_the_others_go_on_exactly_P1_P3(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    """First the leader, then another."""
    steps, hurry = ("--steps", "60"), tmp_path / "hurry"
    job = jobs.start(TRAIN, *steps, "--slow-until", str(hurry), workers=3)
    for rank, reason in ((0, "its fan is loud"), (1, "its fan is silent")):
        job.reach_step(job.steps() + 10)
        victim = job.members()[rank]
        answer = job.client.report_failure(worker_id=victim, reason=reason)
        assert [action["action"] for action in answer["actions"]] == ["Fence", "Reconfigure"]
        wait_for(functools.partial(has_ended, job, victim), "the fenced worker ends")
    hurry.touch()
    result = job.wait()
    result.assert_exact(references.digest(*steps), faults=2, steps=60)
    assert "its fan is loud" in result.output and "its fan is silent" in result.output


def test_help_answers_at_once(tmp_path: Path) -> None:
    """By its own processor time: what else the machine does is not its business."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert "craft run --workers 4" in craft("--help", cwd=tmp_path).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.5


def test_importing_craft_loads_no_torch() -> None:
    code = "import sys, craft, craft.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=LIMIT_S).returncode == 0


def test_a_script_runs_alone_outside_of_craft_run_with_the_same_bits_P1(tmp_path: Path, references: References) -> None:
    """As a job of one worker; it writes no files, so that its state is printed by the script itself."""
    text = f"""
        import runpy, sys
        from craft.snapshots.state.leaves import digest
        from craft.worker.entry.worker_process import process
        sys.argv = ["train.py"]
        runpy.run_path({str(TRAIN)!r}, run_name="__main__")
        print(digest(process.job._training.state.leaves()))
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script(tmp_path, text))],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == references.digest()
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]
