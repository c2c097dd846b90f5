"""Run real jobs for tests: ``craft run`` as a process, faults in it, a limit on its time, and nothing left behind."""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from craft.settings.rundir import RunDir
from craft.telemetry.history import Run, read_run
from craft.telemetry.records.journal import read_lines
from craft.testing.faults import PlacedFault, encode, struck
from craft.testing.history import check, final_digests
from craft.wire.client import Client

T = TypeVar("T")

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN = SCRIPTS / "train.py"
CRAFT = (sys.executable, "-m", "craft.cli.main")
LIMIT_S = 90.0
"""No job of a test takes this long, on however slow a machine."""
SESSION_VARIABLE = "PYTEST_CRAFT_SESSION"
JOB_VARIABLE = "PYTEST_CRAFT_JOB"


def wait_for(condition: Callable[[], T | None], what: str, limit_s: float = LIMIT_S) -> T:
    """Poll until ``condition()`` gives something; AssertionError after the limit."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        time.sleep(0.005)
    return found


def marked(variable: str, value: str) -> list[psutil.Process]:
    """Living processes that were started with this in their environment, by whomever."""
    wanted = f"{variable}={value}".encode()
    found = []
    for process in psutil.process_iter():
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            if wanted in environment.split(b"\0") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (OSError, psutil.NoSuchProcess):
            continue
    return found


def end(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


@dataclass(frozen=True)
class Result:
    """How a job ended."""

    exit_code: int
    output: str
    errors: str
    run_dir: Path
    wall_s: float

    @property
    def run(self) -> Run:
        return read_run(self.run_dir)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.run.journal if line.get("event") == name]

    @property
    def digests(self) -> set[str | None]:
        """Of the final states of all workers that finished."""
        return set(final_digests(self.run).values())

    @property
    def digest(self) -> str:
        """The one final state of all workers that finished."""
        (found,) = self.digests
        assert found is not None
        return found

    @property
    def struck(self) -> dict[int, str]:
        """Which faults struck which workers."""
        return struck(self.run_dir)

    def assert_exact(self, reference: str, *, faults: int, steps: int | None = None) -> None:
        """P1 to P3: the job ended well, with the bits of the undisturbed one, and ``faults`` workers were lost on the way."""
        told = describe(self)
        assert self.exit_code == 0, told
        report = check(self.run_dir, reference)
        assert report.violations == (), "\n".join(report.violations) + told
        assert steps is None or report.steps == steps, told
        lost = {worker for line in self.run.journal if line.get("outcome") == "Fault" for worker in line["worker_ids"]}
        assert len(lost) == faults, told


def describe(result: Result) -> str:
    """All that a failed test needs to show of a job."""
    parts = [f"\nexit code {result.exit_code} after {result.wall_s:.1f} s", result.output, result.errors]
    for file in [RunDir(result.run_dir).journal, *sorted(result.run_dir.glob("workers/*/log"))]:
        if file.exists():
            lines = file.read_text(errors="replace").splitlines()
            # Torch prints the stacks of its own warnings.
            kept = [line for line in lines if not line.startswith(("frame #", "<omitting", "Exception raised from"))]
            parts.append("\n".join([f"--- {file.relative_to(result.run_dir)}", *kept[-100:]]))
    return "\n".join(parts)


@dataclass
class Job:
    """A ``craft run`` that was started."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    mark: str
    files: Path
    """Standard output and error go to files with this beginning: a full pipe would stop the job."""
    started: float = field(default_factory=time.monotonic)

    def wait(self, limit_s: float = LIMIT_S) -> Result:
        """Wait for its end; one that hangs is ended, and what it was doing is in the failure."""
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._dump_stacks()
            self.end()
            raise AssertionError(f"the job did not end within {limit_s:g} s" + describe(self._result())) from None
        wait_for(lambda: not self.processes(), "every process of the job ends with it", 10)
        return self._result()

    def _result(self) -> Result:
        return Result(
            exit_code=self.process.returncode,
            output=self.files.with_suffix(".out").read_text(errors="replace"),
            errors=self.files.with_suffix(".err").read_text(errors="replace"),
            run_dir=self.run_dir,
            wall_s=time.monotonic() - self.started,
        )

    def processes(self) -> list[psutil.Process]:
        """Every living process of the job, except ``craft run`` itself."""
        return [process for process in marked(JOB_VARIABLE, self.mark) if process.pid != self.process.pid]

    def _dump_stacks(self) -> None:
        """Have every worker write its stacks into its log; only scripts that registered for the signal survive it."""
        for pid in self.pids().values():
            os.kill(pid, signal.SIGUSR1)
        time.sleep(1.0)

    def pids(self) -> dict[str, int]:
        """Process ids of the workers that joined and live."""
        living = {process.pid for process in self.processes()}
        return {worker: pid for worker, pid in self._reported().items() if pid in living}

    def _reported(self) -> dict[str, int]:
        journal = read_lines(RunDir(self.run_dir).journal)
        return {line["member"]["worker_id"]: line["pid"] for line in journal if line.get("event") == "WorkerJoined"}

    def helper(self, name: str) -> psutil.Process:
        """The process of the job that runs the module ``name``: its fork server or its lighthouse."""
        return wait_for(
            lambda: next((each for each in self.processes() if f"-m {name}" in " ".join(_command(each))), None),
            f"{name} was started",
        )

    @property
    def client(self) -> Client:
        return Client.of_run(RunDir(self.run_dir))

    def journal(self) -> list[dict[str, Any]]:
        return list(read_lines(RunDir(self.run_dir).journal))

    def committing(self) -> set[str]:
        """Workers that have committed a step, dead ones included."""
        return {file.parent.name for file in self.run_dir.glob("workers/*/steps.jsonl") if file.stat().st_size}

    def wait_for_committing(self, number: int) -> None:
        """Wait until so many workers have ever committed a step."""

        def there() -> bool:
            ended = self.process.poll() is not None
            if len(self.committing()) >= number:
                return True
            assert not ended, f"ended before {number} workers had committed" + describe(self._result())
            return False

        try:
            wait_for(there, f"{number} workers have committed a step")
        except AssertionError as error:
            raise AssertionError(f"{error}{describe(self._result())}") from None

    def members(self) -> list[str]:
        """The workers of the newest generation, in the order of their ranks."""
        made = [line["members"] for line in self.journal() if line.get("action") == "Reconfigure"]
        return list(made[-1]) if made else []

    def steps(self) -> int:
        """Number of committed steps, as written down so far."""
        return sum(1 for _ in read_lines(RunDir(self.run_dir).metrics))

    def reach_step(self, number: int) -> None:
        """Wait until this many steps are committed."""

        def there() -> bool:
            assert self.process.poll() is None, f"ended before step {number}" + describe(self._result())
            return self.steps() >= number

        wait_for(there, f"{number} steps are committed")

    def kill(self, *workers: str) -> None:
        """SIGKILL to workers, at the same instant: all are stopped before the first one dies."""
        wait_for(lambda: self._reported().keys() >= set(workers), "they have joined")
        pids = [self._reported()[worker] for worker in workers]
        for number in (signal.SIGSTOP, signal.SIGKILL) if len(pids) > 1 else (signal.SIGKILL,):
            for pid in pids:
                os.kill(pid, number)

    def interrupt(self) -> None:
        """Press Ctrl-C: everything in the command's process group gets the signal."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> None:
        """End whatever of the job is left."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        end(self.processes())


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


class Jobs:
    """Starts jobs below one directory, and ends them all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Job] = []

    def start(
        self,
        script: Path | str = TRAIN,
        *arguments: str,
        workers: int = 4,
        faults: Sequence[PlacedFault] = (),
        options: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        inside: Sequence[str] = (),
    ) -> Job:
        """Start ``craft run`` on a script; its run directory and working directory are below the folder.

        ``inside`` is the beginning of a command that becomes the one behind it, in other surroundings.
        """
        mark = uuid.uuid4().hex
        name = f"job{len(self._started)}"
        run_dir, files = self._folder / name / "run", self._folder / name / "craft"
        files.parent.mkdir(parents=True)
        surroundings = {
            **os.environ,
            # Several buckets in a small model, so that an exchange has parts that a fault can fall between.
            "CRAFT_BUCKET_MB": "0.01",
            # Most tests are about the survivors: lost workers stay lost, unless a test wants it otherwise.
            "CRAFT_MAX_RESTARTS": "0",
            **(environment or {}),
            **(encode(faults) if faults else {}),
            JOB_VARIABLE: mark,
        }
        command = [*inside, *CRAFT, "run", "--workers", str(workers), "--dir", str(run_dir)]
        command += [*options, str(script), *arguments]
        with files.with_suffix(".out").open("wb") as out, files.with_suffix(".err").open("wb") as err:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=surroundings,
                cwd=files.parent,
                # A process group of its own, as a shell gives to each command, so that a test can press Ctrl-C.
                start_new_session=True,
            )
        job = Job(process=process, run_dir=run_dir, mark=mark, files=files)
        self._started.append(job)
        return job

    def run(self, script: Path | str = TRAIN, *arguments: str, limit_s: float = LIMIT_S, **more: Any) -> Result:
        """Run a job to its end."""
        return self.start(script, *arguments, **more).wait(limit_s)

    def end(self) -> None:
        for job in self._started:
            job.end()


class References:
    """The final states of undisturbed runs, each computed once, by whichever of several test processes is the first."""

    def __init__(self, jobs: Jobs, shared: Path) -> None:
        """``shared`` is a directory of all test processes of this session."""
        self._jobs = jobs
        self._shared = shared

    def digest(self, *arguments: str, workers: int = 4) -> str:
        """The digest that ``train.py`` ends with if nothing fails."""
        return self.digest_of(TRAIN, *arguments, workers=workers)

    def digest_of(self, script: Path, *arguments: str, workers: int = 4) -> str:
        """The digest that a script ends with if nothing fails."""
        key = "\n".join([script.read_text(), *arguments, str(workers)])
        with (self._shared / hashlib.blake2b(key.encode(), digest_size=16).hexdigest()).open("a+") as file:
            # Whoever else wants it waits until it is there.
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            found = file.read()
            if not found:
                result = self._jobs.run(script, *arguments, workers=workers)
                assert result.exit_code == 0, describe(result)
                assert check(result.run_dir).violations == (), describe(result)
                found = result.digest
                file.write(found)
            return found


def leftovers(limit_s: float) -> Iterator[str]:
    """End what this test session started and left behind, and say what it was."""
    mark = os.environ[SESSION_VARIABLE]
    deadline = time.monotonic() + limit_s
    while (found := marked(SESSION_VARIABLE, mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in found:
        yield f"{process.pid}: {' '.join(_command(process))}"
    end(found)
