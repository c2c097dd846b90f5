"""Run a job of several hosts: ``craft lighthouse`` and one ``craft run`` per host, each in a network namespace.

Enters: names of hosts. Leaves: how the job went, from the files of all of them. Faults of the network are set on
``Hosts.network``, those of processes on ``Hosts.jobs``. All hosts share one file system, and each has its own run
directory, as on a cluster.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from craft.settings.rundir import RunDir
from craft.telemetry.history import Commit, read_run
from craft.telemetry.records.journal import read_lines
from craft.testing.history import HistoryReport, check

from .jobs import CRAFT, LIMIT_S, TRAIN, Job, Jobs, Result, describe, wait_for
from .network import Network

LIGHTHOUSE = "lighthouse"
PORT = 29400
HEARTBEAT_LIMIT_S = 1.5
"""Short, since tests wait for it; longer than by default, since a test's machine does all of this on a few cores."""

STEPS = 200
LENGTH = ("--steps", str(STEPS))
"""Long enough that faults from outside strike while the job goes on."""

REPLACE = {"CRAFT_MAX_RESTARTS": "50"}
"""Lost workers are replaced; in tests they are not by default, so that what the survivors do shows."""


class Hosts:
    """The hosts of one job, and its lighthouse."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        workers: int = 1,
        network: Any = None,
        port: int = PORT,
        script: Path = TRAIN,
    ) -> None:
        """``network``: where the hosts are, if not in namespaces of their own; then ``port`` is not theirs alone."""
        self._script = script
        self.network = network or Network((LIGHTHOUSE, *names))
        self._port = port
        self.names = tuple(names)
        self.workers = workers
        """Of each host."""
        self.jobs: dict[str, Job] = {}
        """The newest ``craft run`` of each host."""
        self.run_dir = folder / LIGHTHOUSE
        """Of the lighthouse."""
        self.lighthouse: subprocess.Popen[bytes] | None = None
        self._lit = 0
        self._folder = folder
        folder.mkdir(parents=True)
        self._jobs = Jobs(folder)
        self._run_dirs: list[Path] = []

    # Starting and ending.

    @property
    def url(self) -> str:
        return f"http://{self.network.address(LIGHTHOUSE)}:{self._port}"

    def light(self, *options: str, limit_s: float = HEARTBEAT_LIMIT_S) -> None:
        """Start the lighthouse, or start it again, and wait until it listens."""
        out = self._folder / f"{LIGHTHOUSE}{self._lit}.out"
        self.lighthouse = self._start_lighthouse(out, "--heartbeat-limit", str(limit_s), *options)
        wait_for(lambda: b"listening" in out.read_bytes() or not self._shines(), "the lighthouse listens", 20)
        assert self._shines(), self.tell()

    def _start_lighthouse(self, out: Path, *options: str) -> subprocess.Popen[bytes]:
        self._lit += 1
        slots = str(self.workers * len(self.names))
        address = self.network.address(LIGHTHOUSE)
        place = ("--dir", str(self.run_dir), "--bind", address, "--port", str(self._port))
        command = [*self.network.inside(LIGHTHOUSE), *CRAFT, "lighthouse", "--workers", slots, *place, *options]
        with out.open("wb") as file:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)

    def _shines(self) -> bool:
        return self.lighthouse is not None and self.lighthouse.poll() is None

    def kill_lighthouse(self) -> None:
        assert self.lighthouse is not None
        self.lighthouse.kill()
        self.lighthouse.wait()

    def refuse_lighthouse(self) -> str:
        """Start a second lighthouse on the same run directory, which must not come up; returns what it says."""
        out = self._folder / "refused.out"
        process = self._start_lighthouse(out)
        assert process.wait(20) == 2
        return out.read_text()

    def start(self, name: str, *arguments: str, host: str | None = None, **more: Any) -> Job:
        """Start ``craft run`` on a host; ``host`` is what it calls itself, if that is another one's name."""
        options = ("--lighthouse", self.url, "--token-file", str(RunDir(self.run_dir).token))
        environment = {"CRAFT_HOST": host or name, "CRAFT_ADDRESS": self.network.address(name)}
        job = self._jobs.start(
            self._script,
            *arguments,
            workers=self.workers,
            options=(*options, *more.pop("options", ())),
            environment={**environment, **more.pop("environment", {})},
            inside=self.network.inside(name),
            **more,
        )
        if host is None:
            self.jobs[name] = job
            self._run_dirs.append(job.run_dir)
        return job

    def start_all(self, *arguments: str, **more: Any) -> None:
        """Start the lighthouse, and then every host."""
        self.light()
        for name in self.names:
            self.start(name, *arguments, **more)

    def wait(self, *names: str, limit_s: float = LIMIT_S) -> dict[str, Result]:
        """Wait until these hosts (or all) have seen the end of the job; one that hangs fails the test, with all stacks."""
        jobs = {name: self.jobs[name] for name in names or self.names}
        try:
            wait_for(lambda: all(job.process.poll() is not None for job in jobs.values()), "the job ends", limit_s)
        except AssertionError as error:
            self._dump_stacks()
            raise AssertionError(f"{error}{self.tell()}") from None
        return {name: job.wait(20) for name, job in jobs.items()}

    def _dump_stacks(self) -> None:
        """Have every worker that lives write its stacks into its log."""
        pids = [pid for name in self.jobs for pid in self.living(name).values()]
        before = self._log_bytes()
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        if pids:
            wait_for(lambda: self._log_bytes() > before, "stacks are written", 5)

    def _log_bytes(self) -> int:
        return sum(file.stat().st_size for path in self._run_dirs for file in path.glob("workers/*/log"))

    def end(self) -> None:
        """End whatever is left, then the network."""
        self._jobs.end()
        if self.lighthouse is not None:
            self.kill_lighthouse()
        self.network.close()

    # Looking on.

    def journal(self) -> list[dict[str, Any]]:
        return list(read_lines(RunDir(self.run_dir).journal))

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.journal() if line.get("event") == name]

    def lost(self) -> set[str]:
        """Workers that were lost while the job was not ending."""
        return {worker for line in self.journal() if line.get("outcome") == "Fault" for worker in line["worker_ids"]}

    def living(self, name: str) -> dict[str, int]:
        """Process ids of a host's workers that joined and live, whatever the lighthouse thinks of them."""
        living = {process.pid for process in self.jobs[name].processes()}
        joined = {line["member"]["worker_id"]: line["pid"] for line in self.events("WorkerJoined")}
        return {worker: pid for worker, pid in joined.items() if pid in living}

    def members(self) -> list[str]:
        """The workers of the newest generation, entered or upcoming, in the order of their ranks."""
        made = [line["members"] for line in self.journal() if line.get("action") in ("Reconfigure", "Propose")]
        return list(made[-1]) if made else []

    def commits(self, name: str) -> dict[str, tuple[Commit, ...]]:
        """What the workers of a host have written down so far."""
        return read_run(self.jobs[name].run_dir).commits

    def steps(self, *names: str) -> int:
        """Number of steps that somebody on these hosts (or on any) has committed."""
        run_dirs = [self.jobs[name].run_dir for name in names] or self._run_dirs
        return max(
            (_last_step(file) + 1 for path in run_dirs for file in path.glob("workers/*/steps.jsonl")), default=0
        )

    def reach_step(self, number: int, *names: str) -> None:
        """Wait until this many steps are committed, by somebody on these hosts (or on any)."""

        def there() -> bool:
            ended = all(job.process.poll() is not None for job in self.jobs.values())
            assert not ended, f"ended before step {number}{self.tell()}"
            return self.steps(*names) >= number

        try:
            wait_for(there, f"{number} steps are committed")
        except AssertionError as error:
            raise AssertionError(f"{error}{self.tell()}") from None

    def wait_for_committing(self, name: str, number: int) -> None:
        """Wait until so many workers of a host, dead ones included, have ever committed a step."""

        def there() -> bool:
            files = self.jobs[name].run_dir.glob("workers/*/steps.jsonl")
            return sum(1 for file in files if file.stat().st_size) >= number

        try:
            wait_for(there, f"{number} workers of host {name} have committed a step")
        except AssertionError as error:
            raise AssertionError(f"{error}{self.tell()}") from None

    def kill(self, name: str) -> None:
        """SIGKILL to the agent of a host."""
        self.jobs[name].process.kill()

    # Judging.

    def check(self, reference: str | Path | None = None) -> HistoryReport:
        """P1 to P3 on the files of all hosts, lost ones included."""
        return check(self.run_dir, reference, self._run_dirs)

    def assert_exact(self, reference: str, *, steps: int, lost: set[str], faults: int | None = None) -> None:
        """The job ended with the bits of the undisturbed one, and exactly the workers of the hosts ``lost`` were lost."""
        report = self.check(reference)
        assert report.violations == (), "\n".join(report.violations) + self.tell()
        assert report.steps == steps, self.tell()
        hosts = {line["member"]["worker_id"]: line["member"]["host"] for line in self.events("WorkerJoined")}
        assert {hosts[worker] for worker in self.lost()} == lost, self.tell()
        expected = self.workers * len(lost) if faults is None else faults
        assert len(self.lost()) == expected, self.tell()

    def tell(self) -> str:
        """All that a failed test needs to show."""
        said = "".join(file.read_text() for file in sorted(self._folder.glob(f"{LIGHTHOUSE}*.out")))
        code = -1 if self.lighthouse is None else self.lighthouse.poll() or 0
        parts = [describe(Result(exit_code=code, output=said, errors="", run_dir=self.run_dir, wall_s=0))]
        for name, job in self.jobs.items():
            parts.append(f"\n=== host {name}{describe(_so_far(job))}")
        return "\n".join(parts)


def _so_far(job: Job) -> Result:
    return Result(
        exit_code=-1 if job.process.poll() is None else job.process.returncode,
        output=job.files.with_suffix(".out").read_text(errors="replace"),
        errors=job.files.with_suffix(".err").read_text(errors="replace"),
        run_dir=job.run_dir,
        wall_s=time.monotonic() - job.started,
    )


def _last_step(path: Path) -> int:
    """The step of the last whole line of a ``steps.jsonl``, -1 if there is none; called often, so it reads the end only."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 8192))
        lines = file.read().split(b"\n")[:-1]
    return int(json.loads(lines[-1])["step"]) if lines else -1


MakeHosts = Callable[..., Hosts]


def assert_ended_well(hosts: Hosts, *names: str) -> None:
    for name, result in hosts.wait(*names).items():
        assert result.exit_code == 0, f"host {name}{hosts.tell()}"
