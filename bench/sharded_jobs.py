"""The jobs of ``bench/sharded.py`` and ``bench/completion.py``: two replicas of two workers each, under three systems."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.commits import Commit, read_commits
from bench.jobs import BENCH, BIN, Job, Member, free_port
from bench.poster_jobs import Torchrun, Watched
from bench.sharded_models import REPLICAS, SHARDS

from craft.settings.rundir import RunDir
from craft.wire.client import Client

TUNED_MS = 500
SAVE_EVERY = 50
WORKERS = REPLICAS * SHARDS
UNLIMITED = "1000"
"""Restarts, of CRAFT and torchrun: their defaults are for jobs in which less fails."""


@dataclass(frozen=True)
class ReplicaMember(Member):
    """A process that trains, and the replica that it is in."""

    replica: int


@dataclass(frozen=True)
class Length:
    """How much is trained, the same for all."""

    samples: int
    """Of one worker and step."""
    steps: int


class ShardedCraft(Watched):
    """``craft run`` with sharded replicas; lost workers are replaced by CRAFT."""

    def __init__(self, folder: Path, length: Length, replicas: int = REPLICAS) -> None:
        args = ["--samples", str(length.samples), "--steps", str(length.steps), "--out", str(folder)]
        options = ["--workers-per-replica", str(SHARDS), "--max-restarts", UNLIMITED]
        super().__init__(folder, "sharded_craft.py", args, replicas * SHARDS, options)

    full = WORKERS
    """What a commit says of the size of a whole job."""

    @property
    def run_dir(self) -> Path:
        return self._run

    @property
    def ended(self) -> bool:
        return self._started[0].poll() is not None

    def replicas(self) -> list[ReplicaMember]:
        """Return the processes that train now, with their replicas."""
        workers = [w for w in Client.of_run(RunDir(self._run)).get_status()["workers"] if w.get("replica") is not None]
        return [ReplicaMember(w["worker_id"], w["pid"], w["replica"]) for w in workers]


class GroupedTorchft(Job):
    """torchft's lighthouse with the flags of its README, and replica groups whose processes are started and ended together."""

    full = REPLICAS
    """What a commit says of the size of a whole job: torchft counts groups."""

    def __init__(self, folder: Path, length: Length, tuned_ms: int | None = None) -> None:
        super().__init__(folder)
        port = free_port()
        flags = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
        flags += [] if tuned_ms is None else ["--heartbeat_timeout_ms", str(tuned_ms)]
        self.lighthouse = self.start([BIN / "torchft_lighthouse", *flags, "--bind", f"[::]:{port}"], "lighthouse.log")
        self._args = ["--samples", str(length.samples), "--steps", str(length.steps), "--out", str(folder)]
        self._args += ["--lighthouse", f"http://localhost:{port}"]
        self._args += [] if tuned_ms is None else ["--group-timeout-ms", str(tuned_ms)]
        self._starts = 0
        self._groups = [self._start_group(group) for group in range(REPLICAS)]

    def _start_group(self, group: int) -> list[subprocess.Popen[bytes]]:
        place = ["--group", str(group), "--store-port", str(free_port())]
        command: list[str | Path] = [sys.executable, BENCH / "sharded_torchft.py", *place, *self._args]
        self._starts += 1
        log = f"{group}.{{}}-{self._starts}.log"
        return [self.start([*command, "--position", str(each)], log.format(each)) for each in range(SHARDS)]

    def log_tail(self, num_lines: int = 10, width: int = 300) -> str:
        """Return the last lines of the newest logs: a job with many kills has hundreds."""
        logs = sorted(self.folder.glob("*.log"), key=lambda path: path.stat().st_mtime)[-2 * WORKERS :]
        lines = [(path.name, path.read_text(errors="replace").splitlines()[-num_lines:]) for path in logs]
        return "\n".join(part for name, tail in lines for part in (f"--- {name}", *(line[:width] for line in tail)))

    def restart_lost(self) -> bool:
        """Start every group anew of which a process was lost, as torchft's launcher does, but at once."""
        lost = [n for n, group in enumerate(self._groups) if any(each.poll() not in (None, 0) for each in group)]
        for number in lost:
            for process in self._groups[number]:
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
                process.wait()
                # It is over: what it left is not to be ended again.
                self._started.remove(process)
            self._groups[number] = self._start_group(number)
        return bool(lost)

    @property
    def running(self) -> bool:
        return self.lighthouse.poll() is None and not self.ended

    @property
    def ended(self) -> bool:
        """Whether a group has trained everything."""
        return any(all(each.poll() == 0 for each in group) for group in self._groups)

    def members(self) -> list[Member]:
        return list(self.replicas())

    def replicas(self) -> list[ReplicaMember]:
        """Return the processes that train now, with their groups."""
        places = [(n, position, each) for n, group in enumerate(self._groups) for position, each in enumerate(group)]
        return [ReplicaMember(f"{n}.{at}", each.pid, n) for n, at, each in places if each.poll() is None]

    def commits(self) -> dict[str, list[Commit]]:
        return {path.name.removesuffix(".jsonl"): read_commits(path) for path in self.folder.glob("*.jsonl")}


class ShardedTorchrun(Torchrun):
    """torchrun with torch's HSDP, which starts all workers again when one ends."""

    def __init__(self, folder: Path, length: Length) -> None:
        Job.__init__(self, folder)
        launch = ["--standalone", "--nproc-per-node", str(WORKERS), "--max-restarts", UNLIMITED]
        script = ["--samples", str(length.samples), "--steps", str(length.steps)]
        script += ["--every", str(SAVE_EVERY), "--out", str(folder)]
        self.start([BIN / "torchrun", *launch, BENCH / "sharded_torchrun.py", *script], "torchrun.log")

    @property
    def ended(self) -> bool:
        return self._started[0].poll() is not None
