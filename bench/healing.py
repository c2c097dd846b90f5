"""Measures how a job heals: replacement of a worker beside torchft's, a stopped worker, a spare, a killed lighthouse.

Every measurement is of a fresh job, except that the lighthouse is killed again and again in one. Example, a quick try:

    python bench/healing.py --rounds 2 --lighthouse-kills 4
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from bench.commits import STEP_WINDOW, Commit, recovery_of, step_time
from bench.conduct import conduct
from bench.jobs import CraftJob, JobFailed, TorchftJob
from bench.recovery import SETTLE_COMMITS, wait_steady, wait_until

WORKERS = 3
MICROBATCHES = 6
LIMIT_S = 60.0
AFTERWARDS = 10
"""Steps after the joiner's first commit that still count as those in which it joins."""


def craft_job(folder: Path, samples: int, ballast_mb: int, *options: str) -> CraftJob:
    args = ["--samples", str(samples), "--microbatches", str(MICROBATCHES), "--ballast-mb", str(ballast_mb)]
    return CraftJob(folder, "recovery_craft.py", args, WORKERS, options)


def undisturbed(job: CraftJob | TorchftJob) -> dict[str, int]:
    """Wait for an undisturbed stretch; return the process ids of the members, by name."""
    wait_steady(job, None, WORKERS, SETTLE_COMMITS)
    members = {member.name: member.pid for member in job.members()}
    wait_steady(job, set(members), WORKERS, SETTLE_COMMITS + STEP_WINDOW)
    return members


def usual_step_s(job: CraftJob, names: Sequence[str], before_s: float) -> float:
    commits = job.commits()
    return statistics.median(step_time([c for c in commits[name] if c.time_s <= before_s]) for name in names)


def longest_s(commits: Sequence[Commit], begin_s: float, end_s: float) -> float:
    """The longest time from commit to commit that ends between two moments."""
    return max((b.time_s - a.time_s for a, b in pairwise(commits) if begin_s <= b.time_s <= end_s), default=0.0)


def measure_replacement(job: CraftJob, draw: random.Random) -> dict[str, float]:
    """From SIGKILL of a worker to the first commit of the one in its place."""
    members = undisturbed(job)
    victim = draw.choice(sorted(members))
    killed = time.time()
    os.kill(members[victim], signal.SIGKILL)
    born: dict[str, float] = {}

    def committed() -> bool:
        for line in job.journal():
            if line.get("event") == "WorkerJoined" and line["member"]["worker_id"] not in members:
                born.setdefault(line["member"]["worker_id"], psutil.Process(line["pid"]).create_time())
        late = {name: found for name, found in job.commits().items() if name not in members and found}
        survivors = [found for name, found in job.commits().items() if name in members and name != victim]
        return (
            bool(late)
            and min(len([c for c in s if c.time_s > min(f[0].time_s for f in late.values())]) for s in survivors)
            > AFTERWARDS
        )

    time.sleep(0.5)
    wait_until(job, committed, "commit of the replacement", LIMIT_S)
    commits = job.commits()
    (newcomer, *_) = sorted(born)
    first = commits[newcomer][0].time_s
    joined = next(
        line["time"]
        for line in job.journal()
        if line.get("event") == "WorkerJoined" and line["member"]["worker_id"] == newcomer
    )
    survivors = [name for name in members if name != victim]
    return {
        "total_s": first - killed,
        "script_s": joined - born[newcomer],
        "step_s": usual_step_s(job, survivors, killed),
        "longest_step_s": max(
            longest_s(commits[name][: _after(commits[name], first)], joined, float("inf")) for name in survivors
        ),
    }


def _after(commits: Sequence[Commit], moment_s: float) -> int:
    """How many commits there are up to some steps after ``moment_s``."""
    return len([c for c in commits if c.time_s <= moment_s]) + AFTERWARDS


def measure_torchft(job: TorchftJob, draw: random.Random) -> dict[str, float]:
    """The same for torchft: its supervisor starts a process again the moment it died."""
    members = undisturbed(job)
    victim = draw.choice(sorted(members))
    killed = time.time()
    os.kill(members[victim], signal.SIGKILL)
    job.restart(victim)

    def committed() -> bool:
        return job.commits()[victim][-1].time_s > killed + 0.2

    time.sleep(0.5)
    wait_until(job, committed, "commit of the replacement", LIMIT_S)
    first = next(c.time_s for c in job.commits()[victim] if c.time_s > killed + 0.2)
    return {"total_s": first - killed}


def measure_signal(job: CraftJob, draw: random.Random, number: signal.Signals, spare: bool) -> dict[str, float]:
    """From a signal to one worker to the last survivor's next commit; with a spare, to that with all slots filled."""
    members = undisturbed(job)
    if spare:
        wait_until(job, lambda: any(w["state"] == "waiting" for w in job.status()["workers"]), "spare", LIMIT_S)
        wait_steady(job, set(members), WORKERS, SETTLE_COMMITS)
    victim = draw.choice(sorted(members))
    sent = time.time()
    os.kill(members[victim], number)
    found: list[dict[str, float]] = []

    def recovered() -> bool:
        survivors = {name: c for name, c in job.commits().items() if name in members and name != victim}
        recovery = recovery_of(sent, survivors)
        if recovery is None:
            return False
        filled = [
            next((c.time_s for c in s if c.time_s > sent and c.generation > 1 and c.world_size == WORKERS), None)
            for s in survivors.values()
        ]
        if spare and None in filled:
            return False
        last = max(moment for moment in filled if moment is not None) - sent if spare else recovery.recovery_s
        found.append({"total_s": last, "step_s": recovery.step_s})
        return True

    time.sleep(1.0)
    wait_until(job, recovered, "commit of a newer generation", LIMIT_S)
    return found[0]


def measure_lighthouse(job: CraftJob, kills: int, draw: random.Random) -> dict[str, Any]:
    """Kill the lighthouse again and again; compare the second after each kill with the second before it."""
    members = undisturbed(job)
    around: list[float] = []
    before: list[float] = []
    killed: list[float] = []
    for _ in range(kills):
        pid = job.status()["lighthouse"]["pid"]
        time.sleep(draw.uniform(1.0, 1.5))
        killed.append(time.time())
        os.kill(pid, signal.SIGKILL)
        time.sleep(1.5)
    commits = next(found for name, found in job.commits().items() if name in members)
    steps = [(b.time_s, b.time_s - a.time_s) for a, b in pairwise(commits)][SETTLE_COMMITS:]
    for moment in killed:
        around.append(max(step for time_s, step in steps if moment < time_s < moment + 1.0))
        before.append(max(step for time_s, step in steps if moment - 1.0 < time_s < moment))
    quiet = [step for time_s, step in steps if not any(m - 0.7 < time_s < m + 1.0 for m in killed)]
    return {
        "step_s": statistics.median(step for _, step in steps),
        "around_s": around,
        "before_s": before,
        "longest_quiet_s": sorted(quiet)[int(0.99 * len(quiet))],
        "generation": max(c.generation for c in commits),
    }


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {}
    failed: list[dict[str, str]] = []

    def attempt(name: str, system: str, measure: Any) -> None:
        try:
            figures = measure()
        except JobFailed as error:
            failed.append({"system": system, "error": f"{name}: {error}"})
            print(f"{name}: FAILED, {error}", flush=True)
            return
        found.setdefault(name, []).append(figures)
        shown = ", ".join(f"{key} {value:.3f}" for key, value in figures.items() if isinstance(value, float))
        print(f"{name}: {shown}", flush=True)

    def craft(name: str, ballast_mb: int, options: Sequence[str], measure: Any) -> None:
        def go() -> Any:
            job = craft_job(folder / f"{name}-{time.monotonic_ns()}", args.samples, ballast_mb, *options)
            with job:
                return measure(job)

        attempt(name, "craft", go)

    def torchft(draw: random.Random) -> None:
        def go() -> Any:
            place = folder / f"torchft-{time.monotonic_ns()}"
            script_args = ["--commits", str(place), "--ballast-mb", str(args.ballast_mb)]
            script_args += ["--samples", str(args.samples * MICROBATCHES // WORKERS)]
            job = TorchftJob(place, "train_torchft.py", script_args, WORKERS)
            with job:
                return measure_torchft(job, draw)

        attempt("torchft", "torchft", go)

    for number in range(args.rounds):
        draw = random.Random(f"{args.seed} {number}")
        craft("replacement", args.ballast_mb, (), partial(measure_replacement, draw=draw))
        if number < args.torchft_rounds:
            torchft(draw)
        craft("stopped", 0, (), partial(measure_signal, draw=draw, number=signal.SIGSTOP, spare=False))
        craft("spare", 50, ("--spares", "1"), partial(measure_signal, draw=draw, number=signal.SIGKILL, spare=True))
    craft("lighthouse", 0, (), partial(measure_lighthouse, kills=args.lighthouse_kills, draw=random.Random(args.seed)))
    return {"measured": found, "failed": failed}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="fresh jobs for each kind of fault (default: 6)")
    parser.add_argument("--torchft-rounds", type=int, default=4, help="replacements of torchft's (default: 4)")
    parser.add_argument("--lighthouse-kills", type=int, default=20)
    parser.add_argument("--ballast-mb", type=int, default=200, help="state to hand over to a replacement")
    parser.add_argument("--samples", type=int, default=48, help="samples of one microbatch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(conduct("healing", parse(), run))
