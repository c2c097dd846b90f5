"""Starts training jobs for the benchmarks, names their processes, and ends every one of them by its pid.

A job is a context manager: whatever happens inside, its processes are gone afterwards. Two kinds: ``craft run``, and
torchft's lighthouse with one process per replica group.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

import psutil
from bench.commits import Commit, read_commits

BENCH = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
CRAFT = (sys.executable, "-m", "craft.cli.main")
GRACE_S = 5.0

Some = TypeVar("Some", bound="Job")


class JobFailed(Exception):
    """A job ended or stalled where the benchmark needed it to run; the message ends with the tail of its log."""


@dataclass(frozen=True)
class Member:
    """A process that trains."""

    name: str
    pid: int


def exit_on_sigterm() -> None:
    """Turn SIGTERM into SystemExit, so that an interrupted benchmark still ends the processes of its jobs."""

    def handler(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)

    signal.signal(signal.SIGTERM, handler)


class Job(ABC):
    """One job: a folder, and the processes started for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True)
        self._started: list[subprocess.Popen[bytes]] = []

    @abstractmethod
    def members(self) -> list[Member]:
        """Return the processes that train now, in the order of their ranks."""

    @abstractmethod
    def commits(self) -> dict[str, list[Commit]]:
        """Return what each worker, dead ones included, has committed so far, by name."""

    @property
    def running(self) -> bool:
        """Whether the processes that hold the job together are all alive."""
        return all(process.poll() is None for process in self._started)

    def start(self, command: Sequence[str | Path], log: str, **env: str) -> subprocess.Popen[bytes]:
        """Start ``command`` in a session of its own, which marks everything it forks as ours to end."""
        with (self.folder / log).open("wb") as out:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def log_tail(self, num_lines: int = 10, width: int = 300) -> str:
        """Return the last lines of every log in the job's folder, for error messages."""
        parts = []
        for path in sorted([*self.folder.rglob("*.log"), *self.folder.rglob("log")]):
            lines = path.read_text(errors="replace").splitlines()[-num_lines:]
            parts += [f"--- {path.relative_to(self.folder)}", *(line[:width] for line in lines)]
        return "\n".join(parts)

    def wait(self, limit_s: float) -> None:
        """Wait until every process has ended with status 0, or raise ``JobFailed``."""
        deadline = time.monotonic() + limit_s
        for process in self._started:
            try:
                status = process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                raise JobFailed(f"{process.args!r} still ran after {limit_s:.0f} s\n{self.log_tail()}") from None
            if status != 0:
                raise JobFailed(f"{process.args!r} ended with status {status}\n{self.log_tail()}")

    def __enter__(self: Some) -> Some:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_sessions(self._started)


def end_sessions(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the given processes and everything they forked: politely first, then with SIGKILL."""
    members = _members(started)
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and any(map(_lives, members)):
        for process in started:
            process.poll()
        time.sleep(0.05)
    for member in {*members, *_members(started)}:
        # psutil compares creation times, so a pid that was reused meanwhile is left alone.
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    for process in started:
        process.wait()


def _lives(member: psutil.Process) -> bool:
    # It may end between the two looks.
    try:
        return member.is_running() and member.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _members(started: Sequence[subprocess.Popen[bytes]]) -> set[psutil.Process]:
    """Return the living processes that descend from ``started`` or belong to one of their sessions."""
    sessions = {process.pid for process in started}
    found: set[psutil.Process] = set()
    for pid in psutil.pids():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            if os.getsid(pid) in sessions:
                member = psutil.Process(pid)
                found |= {member, *member.children(recursive=True)}
    return found


class CraftJob(Job):
    """``craft run`` of one of the scripts in this folder."""

    def __init__(
        self, folder: Path, script: str, args: Sequence[str], workers: int, options: Sequence[str] = ()
    ) -> None:
        super().__init__(folder)
        self.start_first()
        self._run = folder / "run"
        flags: list[str | Path] = ["--workers", str(workers), "--dir", self._run, *options]
        command: list[str | Path] = [*CRAFT, "run", *flags, BENCH / script, *args]
        self.start(command, "craft.log")

    def start_first(self) -> None:
        """Start what the job itself needs; nothing, here."""

    @property
    def address(self) -> str:
        """The lighthouse's URL."""
        return (self._run / "address").read_text().strip()

    @property
    def token(self) -> str:
        return (self._run / "token").read_text().strip()

    def status(self) -> dict[str, Any]:
        command: list[str | Path] = [*CRAFT, "status", "--json", "--dir", self._run]
        found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=20).stdout)
        return found

    def journal(self) -> list[dict[str, Any]]:
        """What happened so far, oldest first."""
        complete, _, _ = (self._run / "journal.jsonl").read_text().rpartition("\n")
        return [json.loads(line) for line in complete.splitlines()]

    def entries(self, worker: str) -> list[dict[str, Any]]:
        """How a worker came into generations, as it wrote that down."""
        text = (self._run / "workers" / worker / "generations.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def members(self) -> list[Member]:
        status = self.status()
        workers = [worker for worker in status["workers"] if worker["rank"] is not None]
        return [Member(w["worker_id"], w["pid"]) for w in sorted(workers, key=lambda w: int(w["rank"]))]

    def commits(self) -> dict[str, list[Commit]]:
        return {path.parent.name: read_commits(path) for path in self._run.glob("workers/*/steps.jsonl")}


class TorchftJob(Job):
    """torchft's lighthouse with the flags of its README, and ``workers`` replica groups of one process each."""

    def __init__(
        self,
        folder: Path,
        script: str,
        args: Sequence[str],
        workers: int,
        heartbeat_timeout_ms: int | None = None,
        min_replicas: int = 1,
    ) -> None:
        super().__init__(folder)
        port = free_port()
        flags = ["--min_replicas", str(min_replicas), "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
        if heartbeat_timeout_ms is not None:
            flags += ["--heartbeat_timeout_ms", str(heartbeat_timeout_ms)]
        self.lighthouse = self.start([BIN / "torchft_lighthouse", *flags, "--bind", f"[::]:{port}"], "lighthouse.log")
        self._commands: list[list[str | Path]] = []
        self._workers = []
        for rank in range(workers):
            place = ["--rank", rank, "--workers", workers, "--lighthouse", f"http://localhost:{port}"]
            self._commands.append([sys.executable, BENCH / script, *map(str, place), *args])
            self._workers.append(self.start(self._commands[rank], f"{rank}.log"))

    def restart(self, name: str) -> None:
        """Start a process in the place of a dead one, as a supervisor of torchft's workers would."""
        rank = int(name)
        self._workers[rank] = self.start(self._commands[rank], f"{rank}-again.log")

    @property
    def running(self) -> bool:
        return self.lighthouse.poll() is None and any(worker.poll() is None for worker in self._workers)

    def members(self) -> list[Member]:
        return [Member(str(rank), w.pid) for rank, w in enumerate(self._workers) if w.poll() is None]

    def commits(self) -> dict[str, list[Commit]]:
        return {str(rank): read_commits(self.folder / f"{rank}.jsonl") for rank in range(len(self._workers))}

    def wait(self, limit_s: float) -> None:
        self._started.remove(self.lighthouse)
        try:
            super().wait(limit_s)
        finally:
            self._started.append(self.lighthouse)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port
