"""Jobs with checkpoints: where they write, and how they lose everything at once."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from .jobs import TRAIN, Job, Jobs, wait_for

STEPS = ("--steps", "60")
SLOWLY = ("--checkpoint-every", "10 steps")


def into(store: Path, *more: str) -> tuple[str, ...]:
    return ("--checkpoints", str(store), *SLOWLY, *more)


def manifests(store: Path) -> list[Path]:
    return sorted((store / "manifests").glob("*.json"))


def kill_all(job: Job) -> None:
    """As a power failure would: nobody has the time to say anything."""
    pids = [job.process.pid, *(process.pid for process in job.processes())]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
    job.process.wait()
    wait_for(lambda: not job.processes(), "all are gone")


def start_and_lose_all(jobs: Jobs, store: Path, complete: int = 1) -> None:
    """So many checkpoints are complete by then."""
    job = jobs.start(TRAIN, *STEPS, "--slow-until", str(store.with_name("never")), options=into(store))
    wait_for(lambda: len(manifests(store)) >= complete, f"{complete} checkpoints are complete")
    # In the middle of what comes after it.
    job.reach_step(job.steps() + 3)
    kill_all(job)
