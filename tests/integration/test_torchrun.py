"""Workers that torchrun started: they join a lighthouse's job, and what torchrun says of them is in its journal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from tests.unit.agent.linux.test_syscalls import KEPT

from craft.settings.rundir import RunDir
from craft.telemetry.records.journal import read_lines
from craft.testing.history import check

from .jobs import CRAFT, JOB_VARIABLE, Jobs, References, end, marked, wait_for

T = TypeVar("T")

TRAIN = Path(__file__).parent / "scripts" / "train_torchrun.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrun" / "train_craft.py"
STEPS = 300
LIMIT_S = 150.0
"""A torchrun imports torch several times before its workers do anything."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
WITH_EVENTS = (sys.executable, "-m", "craft.adapters.torchelastic")


class Torchruns:
    """A lighthouse, and torchruns whose workers join its job: each is a host of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mark = uuid.uuid4().hex
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self.run_dir = folder / "lighthouse"

    def light(self, workers: int) -> None:
        self._start("lighthouse", [*CRAFT, "lighthouse", "--workers", str(workers), "--dir", str(self.run_dir)])
        wait_for(RunDir(self.run_dir).address.exists, "the lighthouse listens")

    def start(
        self, name: str, script: Path, *arguments: str, workers: int, restarts: int, by: tuple[str, ...], **around: str
    ) -> None:
        place = {"CRAFT_LIGHTHOUSE": RunDir(self.run_dir).read_address(), "CRAFT_HOST": name, **around}
        place |= {"CRAFT_TOKEN_FILE": str(RunDir(self.run_dir).token), "CRAFT_DIR": str(self._folder / name)}
        options = ("--standalone", "--nproc-per-node", str(workers), "--max-restarts", str(restarts))
        self._start(name, [*by, *options, str(script), *arguments], **place)

    def _start(self, name: str, command: list[str], **around: str) -> None:
        with (self._folder / f"{name}.out").open("wb") as out:
            environment = {**os.environ, **around, JOB_VARIABLE: self._mark}
            self._started[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, cwd=self._folder
            )

    def wait(self, name: str) -> int:
        return self._wait_for(lambda: self._over(name), f"{name} ends")[0]

    def _wait_for(self, condition: Callable[[], T | None], what: str) -> T:
        try:
            return wait_for(condition, what, LIMIT_S)
        except AssertionError as error:
            raise AssertionError(f"{error}{self.tell()}") from None

    def _over(self, name: str) -> tuple[int] | None:
        code = self._started[name].poll()
        return None if code is None else (code,)

    def journal(self) -> list[dict[str, Any]]:
        return list(read_lines(RunDir(self.run_dir).journal))

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.journal() if line.get("event") == name]

    def joined(self, host: str) -> dict[str, int]:
        """Process ids of the workers of a host that have ever joined."""
        members = [(line["member"], line["pid"]) for line in self.events("WorkerJoined")]
        return {member["worker_id"]: pid for member, pid in members if member["host"] == host}

    def committing(self, name: str) -> int:
        """Workers of a host that have ever committed a step."""
        return sum(1 for file in (self._folder / name).glob("workers/*/steps.jsonl") if file.stat().st_size)

    def wait_for_committing(self, name: str, number: int) -> None:
        self._wait_for(lambda: self.committing(name) >= number, f"{number} workers of {name} have committed")

    def wait_for_event(self, name: str) -> None:
        self._wait_for(lambda: self.events(name), f"{name} is in the journal")

    def tell(self) -> str:
        files = [*self._folder.glob("*.out"), *self._folder.glob("*/agent.log"), *self._folder.glob("*/journal.jsonl")]
        return "".join(f"\n--- {file.name}\n{file.read_text(errors='replace')[-6000:]}" for file in files)

    def processes(self) -> list[psutil.Process]:
        return marked(JOB_VARIABLE, self._mark)

    def end(self) -> None:
        for process in self._started.values():
            process.kill()
            process.wait()
        end(self.processes())


@pytest.fixture
def torchruns(tmp_path: Path) -> Iterator[Torchruns]:
    found = Torchruns(tmp_path)
    yield found
    found.end()


@pytest.mark.timeout(400)
def test_a_worker_of_one_torchrun_dies_and_those_of_the_other_go_on_P1_P2_P3(
    torchruns: Torchruns, references: References, tmp_path: Path
) -> None:
    """torchrun ends the workers beside it, and starts all of its own again: they join, and not a bit has changed."""
    expected = references.digest_of(TRAIN, workers=2)
    go = tmp_path / "go"
    torchruns.light(workers=3)
    slow = ("--slow-until", str(go))
    torchruns.start("a", TRAIN, *slow, workers=1, restarts=0, by=TORCHRUN, OMP_NUM_THREADS="1", PYTHONHASHSEED="0")
    torchruns.start("b", TRAIN, *slow, workers=2, restarts=2, by=WITH_EVENTS, PYTHONHASHSEED="")
    torchruns.wait_for_committing("b", 2)
    victim, pid = next(iter(torchruns.joined("b").items()))
    os.kill(pid, signal.SIGKILL)
    torchruns.wait_for_committing("b", 4)
    go.touch()
    assert (torchruns.wait("a"), torchruns.wait("b")) == (0, 0), torchruns.tell()
    report = check(torchruns.run_dir, expected, [tmp_path / "a", tmp_path / "b"])
    assert report.violations == () and report.steps == STEPS, "\n".join(report.violations) + torchruns.tell()
    lost = {line["worker_id"]: line["reason"] for line in torchruns.events("WorkerLost") if line["source"] == "agent"}
    assert set(lost) == set(list(torchruns.joined("b"))[:2]), torchruns.tell()
    # Before Linux 6.15 nobody can tell once torchrun has looked, which it may do first.
    assert lost[victim] == "killed by SIGKILL" or (lost[victim] == "ended in an unknown way" and not KEPT)
    told = [line for line in torchruns.events("AlertFired") if line["name"].startswith("torchelastic.worker.status.")]
    starts = [line["labels"] for line in told if line["name"].endswith("START")]
    assert [each["restarts"] for each in starts] == ["0", "0", "1", "1"], told
    assert any(line["name"].endswith("SUCCEEDED") for line in told), told
    warned = [(tmp_path / f"{name}.out").read_text().count("PYTHONHASHSEED is not set") for name in "ab"]
    assert warned == [0, 1], "a host is warned once, and not if it is set"
    wait_for(lambda: len(torchruns.processes()) <= 1, "the agents end with their torchruns", 30)


@pytest.mark.timeout(300)
def test_workers_that_a_torchrun_starts_when_the_job_is_over_end_as_it_did(
    torchruns: Torchruns, tmp_path: Path
) -> None:
    """As after a death shortly before the end: the others have finished when torchrun has started its workers again."""
    torchruns.light(workers=2)
    subprocess.run([*CRAFT, "stop", "--dir", str(torchruns.run_dir)], check=True, timeout=60)
    torchruns.start("a", TRAIN, workers=2, restarts=0, by=TORCHRUN)
    assert torchruns.wait("a") == 0, torchruns.tell()
    said = (tmp_path / "a.out").read_text()
    assert said.count("craft: the job is over: stopped by a person") == 2, torchruns.tell()
    wait_for(lambda: len(torchruns.processes()) <= 1, "the agent ends with its torchrun", 30)


@pytest.mark.timeout(300)
def test_what_a_worker_left_in_its_error_file_is_in_the_journal(torchruns: Torchruns) -> None:
    torchruns.light(workers=1)
    torchruns.start("a", TRAIN, "--fail-at", "2", workers=1, restarts=0, by=WITH_EVENTS)
    assert torchruns.wait("a") == 1
    (failed,) = torchruns.events("WorkerFailed")
    assert (failed["error"], failed["step"]) == ("ValueError: the script's own mistake", 2), torchruns.tell()
    of_worker = [line for line in torchruns.events("AlertFired") if line["name"].endswith("status.FAILED")]
    assert "ValueError: the script's own mistake" in of_worker[0]["labels"]["error"], torchruns.tell()
    assert of_worker[0]["labels"]["exit_code"] == "1"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_torchrun_whose_workers_all_die_goes_on_from_its_checkpoint_with_the_same_bits_P1_P7(
    torchruns: Torchruns, references: References, tmp_path: Path
) -> None:
    expected = references.digest_of(TRAIN, workers=2)
    go = tmp_path / "go"
    torchruns.light(workers=2)
    around = {"CRAFT_CHECKPOINTS": str(tmp_path / "store"), "CRAFT_CHECKPOINT_EVERY": "1 steps"}
    torchruns.start("a", TRAIN, "--slow-until", str(go), workers=2, restarts=2, by=TORCHRUN, **around)
    torchruns.wait_for_event("CheckpointWritten")
    os.kill(next(iter(torchruns.joined("a").values())), signal.SIGKILL)
    torchruns.wait_for_committing("a", 4)
    go.touch()
    assert torchruns.wait("a") == 0, torchruns.tell()
    report = check(torchruns.run_dir, expected, [tmp_path / "a"])
    assert report.violations == () and torchruns.events("CheckpointRestored"), torchruns.tell()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_processes_of_a_torchrun_do_not_each_become_a_job_of_their_own(tmp_path: Path) -> None:
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", str(TRAIN)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=tmp_path)
    assert done.returncode == 1
    assert "CRAFT_LIGHTHOUSE is not set: each would be a separate job" in done.stderr


@pytest.mark.long
def test_the_example_for_torchrun_runs(jobs: Jobs) -> None:
    assert jobs.run(EXAMPLE, workers=2).exit_code == 0
