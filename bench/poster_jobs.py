"""The jobs of ``bench/poster.py``: six systems, each with a way to have a lost worker replaced."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from bench.commits import Commit, read_commits
from bench.jobs import BENCH, BIN, CraftJob, Job, Member, TorchftJob, free_port

from craft.settings.rundir import RunDir
from craft.wire.client import Client

TUNED_MS = 500
SAVE_EVERY = 50
GROUP_TIMEOUT_S = 10


@dataclass(frozen=True)
class Size:
    """How much is trained, the same for all."""

    workers: int
    microbatches: int
    samples: int
    """Of one microbatch."""

    @property
    def batch(self) -> int:
        """Samples of one worker, where there are no microbatches."""
        return self.samples * self.microbatches // self.workers


class Watched(CraftJob):
    """``craft run``; lost workers are replaced by CRAFT."""

    def members(self) -> list[Member]:
        # Not by the command: to start it takes processor time from the job.
        workers = [w for w in Client.of_run(RunDir(self._run)).get_status()["workers"] if w["rank"] is not None]
        return [Member(w["worker_id"], w["pid"]) for w in sorted(workers, key=lambda w: int(w["rank"]))]


class UnderCraft(Watched):
    """torchft's loop and torchft's lighthouse, with the flags of its README, as guests of CRAFT's."""

    def __init__(self, folder: Path, size: Size) -> None:
        bind = f"127.0.0.1:{free_port()}"
        self._address = f"http://{bind}"
        self._bind = bind
        script = ["--under-craft", "--lighthouse", self._address, "--workers", str(size.workers)]
        script += ["--samples", str(size.batch), "--commits", str(folder)]
        super().__init__(folder, "train_torchft.py", script, size.workers)

    def start_first(self) -> None:
        flags = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
        module = [sys.executable, "-m", "craft.adapters.torchft.lighthouse"]
        self.start([*module, *flags, "--bind", self._bind], "lighthouse.log")

    def commits(self) -> dict[str, list[Commit]]:
        return {path.stem: read_commits(path) for path in self.folder.glob("w*.jsonl")}


class Plain(TorchftJob):
    """torchft with one process per replica group, and somebody who starts another one for each that is lost."""

    def replace(self, victim: Member) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGKILL)
        self._workers[int(victim.name)].wait()
        self.restart(victim.name)


class Torchrun(Job):
    """torchrun, which starts all workers again when one ends."""

    def __init__(self, folder: Path, size: Size) -> None:
        super().__init__(folder)
        launch = ["--standalone", "--nproc-per-node", str(size.workers), "--max-restarts", "1000"]
        script = ["--samples", str(size.batch), "--every", str(SAVE_EVERY), "--commits", str(folder)]
        script += ["--group-timeout-s", str(GROUP_TIMEOUT_S)]
        self.start([BIN / "torchrun", *launch, BENCH / "poster_torchrun.py", *script], "torchrun.log")

    def members(self) -> list[Member]:
        found = [Member(path.stem, int(path.read_text() or 0)) for path in sorted(self.folder.glob("*.pid"))]
        return [member for member in found if member.pid and psutil.pid_exists(member.pid)]

    def commits(self) -> dict[str, list[Commit]]:
        return {path.stem: read_commits(path) for path in self.folder.glob("*.jsonl")}


def _torchft(folder: Path, size: Size, tuned_ms: int | None = None) -> Job:
    script = ["--commits", str(folder), "--samples", str(size.batch)]
    script += [] if tuned_ms is None else ["--group-timeout-ms", str(tuned_ms)]
    return Plain(folder, "train_torchft.py", script, size.workers, tuned_ms)


def _native(folder: Path, size: Size) -> Job:
    script = ["--samples", str(size.samples), "--microbatches", str(size.microbatches)]
    return Watched(folder, "recovery_craft.py", script, size.workers)


def _lightning(folder: Path, size: Size) -> Job:
    script = ["--samples", str(size.samples), "--accumulate", str(size.microbatches // size.workers)]
    return Watched(folder, "poster_lightning.py", script, size.workers)


SYSTEMS: dict[str, Callable[[Path, Size], Job]] = {
    "checkpoint-restart": Torchrun,
    "torchft": _torchft,
    "torchft-tuned": lambda folder, size: _torchft(folder, size, TUNED_MS),
    "torchft-under-craft": UnderCraft,
    "craft-lightning": _lightning,
    "craft": _native,
}


def replace_lost(job: Job, victim: Member) -> None:
    """Have another worker take the place of ``victim``, where the system does not do so itself."""
    if isinstance(job, Plain):
        job.replace(victim)
