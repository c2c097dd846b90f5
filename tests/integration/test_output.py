"""What workers print, on the terminal of ``craft run``."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from craft.testing.faults import PlacedFault

from .jobs import CRAFT, LIMIT_S, SCRIPTS, Jobs, describe, wait_for

PRINTS = SCRIPTS / "prints.py"
ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


def of_workers(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("[")]


@contextmanager
def ended(job: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """End the job with the test; its workers end with it."""
    try:
        yield job
    finally:
        job.kill()
        job.communicate()


def read_all(terminal: int) -> Iterator[bytes]:
    """All that is written to a terminal until its other end is closed."""
    with open(terminal, "rb", buffering=0) as file, suppress(OSError):
        while data := file.read(1 << 16):
            yield data


def test_output_goes_on_with_the_next_leader_and_no_line_is_lost_or_repeated(jobs: Jobs) -> None:
    result = jobs.run(PRINTS, "--kill-at", "12", workers=3)
    assert result.exit_code == 0, describe(result)
    before = ["[w0] loading", *(f"[w0] step {number}" for number in range(1, 13)), "[w0] \ufffd last words"]
    after = [*(f"[w1] step {number}" for number in range(13, 31)), "[w1] w1 is done"]
    assert of_workers(result.output) == [*before, *after], describe(result)
    # The file is as the script wrote it.
    assert b"\x1b[31mstep 12\x1b[0m\x1b[2K\n\xff\x00 last words" in (result.run_dir / "workers/w0/log").read_bytes()


def test_on_a_terminal_output_and_progress_bar_do_not_tear_each_other(tmp_path: Path) -> None:
    """All workers, many lines, a real terminal: what a person sees of each line is the whole line."""
    command = [*CRAFT, "run", "--dir", str(tmp_path / "run"), "--workers", "2", "--tee", "all"]
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    # Less than 16 KiB: of more than that, written since the last look, only the end is shown.
    command += [str(PRINTS), "--steps", "60", "--chatter", "3"]
    with ended(subprocess.Popen(command, stdout=follower, stderr=follower, env=environment)) as job:
        os.close(follower)
        written = b"".join(read_all(leader))
        assert job.wait(LIMIT_S) == 0
    # What a terminal leaves of a line: what follows the last carriage return.
    plain = ESCAPES.sub("", written.decode()).split("\n")
    seen = [line.rstrip("\r").rpartition("\r")[2] for line in plain]
    assert [line for line in seen if "[w" in line and not line.startswith("[w")] == []
    expected = ["loading"]
    for number in range(1, 61):
        expected += [f"step {number}", *(f"chatter {each} {'.' * 60}" for each in range(3))]
    assert [line[5:] for line in seen if line.startswith("[w0] ")] == [*expected, "w0 is done"]
    assert [line[5:] for line in seen if line.startswith("[w1] ")] == ["loading", "w1 is done"]
    assert b"\x1b[31mstep 1\x1b[0m" in written and b"step 1\x1b[0m\x1b[2K" not in written


def test_a_reader_that_stops_reading_stops_neither_the_job_nor_its_heartbeats(tmp_path: Path) -> None:
    """Nothing reads the pipe while the job trains: no worker is lost, and what it cannot take is left out."""
    command = [*CRAFT, "run", "--dir", str(tmp_path / "run"), "--workers", "2", str(PRINTS)]
    command += ["--chatter", "2000", "--fail"]
    with ended(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)) as job:
        assert job.stdout is not None
        journal = tmp_path / "run" / "journal.jsonl"
        wait_for(lambda: journal.exists() and '"action":"Stop"' in journal.read_text(), "the job is over")
        output = job.stdout.read().decode()
        assert job.wait(LIMIT_S) == 1
    assert re.search(r"\[w0\] \.\.\. \d+ lines left out, see workers/w0/log", output)
    assert " lost: " not in output
    # The replacement runs the code after the loop again, and fails there, too: that is the leader's output then.
    for leader in ("w0", "w2"):
        assert f"[{leader}] {leader} is done\n[{leader}] Traceback (most recent call last):\n" in output
    assert output.count("] ValueError: a bug after the loop\n") == 2
    assert output.count("\n  ValueError: a bug after the loop\n") == 0


def test_the_error_that_hydra_made_an_exit_code_of_ends_the_job_by_name(jobs: Jobs) -> None:
    result = jobs.run(SCRIPTS / "hydra_main.py", workers=2)
    assert result.exit_code == 1, describe(result)
    (last,) = [line for line in result.output.splitlines() if line.startswith("craft: ended")]
    assert "ValueError: the data is bad" in last and "step 5, microbatch" in last, describe(result)
    assert result.events("WorkerFailed")[0]["traceback"].endswith("ValueError: the data is bad\n")


def test_a_loss_before_the_first_step_takes_nothing_from_goodput(jobs: Jobs) -> None:
    result = jobs.run(PRINTS, workers=2, faults=[PlacedFault(point="loading", worker="w1")])
    assert result.exit_code == 0, describe(result)
    assert "1 fault, goodput 100.00%" in result.output, describe(result)
    assert "generation 2: w1: lost before the first step was committed: this time is not counted" in result.output


def test_a_job_does_not_wait_at_its_end_for_a_replacement_that_never_joins(jobs: Jobs) -> None:
    """w2 takes the place of w0, does not come to its first step, and does not listen to SIGTERM."""
    job = jobs.start(PRINTS, "--kill-at", "12", "--stuck", "w2", workers=2, options=("--max-restarts", "3"))
    log = job.run_dir / "workers/w1/log"
    wait_for(lambda: log.exists() and "w1 is done" in log.read_text(), "training is over")
    result = job.wait(30.0)
    assert result.exit_code == 0, describe(result)
    assert (result.run_dir / "workers/w2/log").read_text() == "loading\nstuck\n"
    assert "craft: finished: every worker finished\n  30 steps in" in result.output, describe(result)
    assert ", 1 fault, goodput" in result.output and "w2 lost" not in result.output


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for that of a socket."""
    with tempfile.TemporaryDirectory(prefix="craft-", dir="/tmp") as folder:
        yield Path(folder)


def test_workers_have_one_hash_seed_and_leave_no_sockets_behind_when_they_are_killed(
    jobs: Jobs, short_folder: Path
) -> None:
    surroundings = {"TMPDIR": str(short_folder), "PYTHONHASHSEED": "", "CRAFT_MAX_RESTARTS": "1"}
    result = jobs.run(PRINTS, "--sockets", "--kill-at", "12", workers=2, environment=surroundings)
    assert result.exit_code == 0, describe(result)
    logs = [file.read_text(errors="replace") for file in result.run_dir.glob("workers/*/log")]
    found = [line.split() for log in logs for line in log.splitlines() if line.startswith("hash ")]
    pinned = {**os.environ, "PYTHONHASHSEED": "0"}
    expected = subprocess.run(
        [sys.executable, "-c", "print(hash('craft'))"], env=pinned, capture_output=True, text=True
    )
    assert len(found) >= 2
    assert {each[1] for each in found} == {expected.stdout.strip()}
    assert not [path for path in short_folder.iterdir() if path.name.startswith("pymp-")]
    assert not [each[3] for each in found if Path(each[3]).exists()]
