"""The chart: six systems, the same model and the same two faults, from the fault to the next step that gets further.

A fault is SIGKILL of one worker, or SIGSTOP, by which it hangs. A job gets several, in turns, each once all workers have been
there undisturbed for a while; which worker and when is chance, the same for all systems. The systems take turns, too. Measured is
the time from the signal until the last of the other workers has committed a step past all that was reached before. Example, a
quick try:

    python bench/poster.py --trials 2
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.commits import Commit, step_time
from bench.conduct import conduct
from bench.jobs import BENCH, Job, JobFailed, Member
from bench.poster_jobs import GROUP_TIMEOUT_S, SAVE_EVERY, SYSTEMS, TUNED_MS, Size, replace_lost
from bench.recovery import wait_until

FAULTS = {"SIGKILL": signal.SIGKILL, "hang": signal.SIGSTOP}
UNDISTURBED = 30
"""Commits of all workers before a fault."""
SPREAD_STEPS = 50
"""A fault comes within so many steps afterwards: anywhere between two saves."""
START_LIMIT_S = 120.0
RECOVERY_LIMIT_S = 180.0
MORE_ROUNDS = 3
"""So many further jobs of a system are tried where some failed."""


def undisturbed(commits: Sequence[Commit], workers: int, since: float) -> bool:
    """Whether the last commits came from one generation of all ``workers``, and all of them after ``since``."""
    tail = commits[-UNDISTURBED:]
    return len(tail) == UNDISTURBED and tail[0].time_s > since and {(c.generation, c.world_size) for c in tail} == {
        (tail[-1].generation, workers)
    }  # fmt: skip


def wait_whole(job: Job, workers: int, since: float) -> list[Member]:
    """Wait until all workers are there and undisturbed; returns them."""
    found: list[list[Member]] = []

    def ready() -> bool:
        commits = job.commits()
        if sum(undisturbed(each, workers, since) for each in commits.values()) < workers:
            return False
        members = job.members()
        whole = len(members) == workers and all(
            undisturbed(commits.get(each.name, []), workers, since) for each in members
        )
        found.extend([members] if whole else [])
        return whole

    wait_until(job, ready, f"{UNDISTURBED} undisturbed commits of {workers} workers", START_LIMIT_S)
    return found[0]


def recovered(began: float, survivors: Mapping[str, Sequence[Commit]]) -> float | None:
    """When the last survivor committed past all that was reached before, in seconds since ``began``; None: not yet."""
    newer: dict[str, list[Commit]] = {}
    reached = 0
    for name, commits in survivors.items():
        before = [each for each in commits if each.time_s <= began]
        newer[name] = [each for each in commits[len(before) :] if each.generation > before[-1].generation]
        # What was under way is completed, perhaps, and belongs to what was reached.
        rest = [each for each in commits if each not in newer[name]]
        reached = max(reached, *(each.step for each in rest))
    firsts = [next((each.time_s for each in found if each.step > reached), None) for found in newer.values()]
    times = [first - began for first in firsts if first is not None]
    return max(times) if len(times) == len(firsts) else None


def strike(job: Job, size: Size, fault: str, chance: random.Random, since: float) -> tuple[dict[str, float], float]:
    """One trial; returns its figures, and when the fault was."""
    members = wait_whole(job, size.workers, since)
    victim = members[chance.randrange(size.workers)]
    names = {member.name for member in members} - {victim.name}
    step_s = sorted(step_time(job.commits()[name][-UNDISTURBED:]) for name in names)[len(names) // 2]
    time.sleep(chance.uniform(0.0, SPREAD_STEPS * step_s))
    began = time.time()
    os.kill(victim.pid, FAULTS[fault])
    found: list[float] = []

    def over() -> bool:
        took = recovered(began, {name: each for name, each in job.commits().items() if name in names})
        found.extend([took] if took is not None else [])
        return bool(found)

    # Nothing is read at first: reading takes processor time from those who recover.
    time.sleep(1.0)
    wait_until(job, over, "commit past what was reached", RECOVERY_LIMIT_S)
    replace_lost(job, victim)
    return {"recovery_s": found[0], "step_s": step_s}, began


def run_job(
    system: str, size: Size, plan: Sequence[str], folder: Path, chance: random.Random, trials: list[dict[str, Any]]
) -> None:
    """Start a job and let the faults of ``plan`` come over it, one after the other."""
    with SYSTEMS[system](folder, size) as job:
        since = 0.0
        for fault in plan:
            figures, since = strike(job, size, fault, chance, since)
            trials.append({"system": system, "fault": fault, **figures})
            took, step = figures["recovery_s"] * 1e3, figures["step_s"] * 1e3
            print(f"{system}, {fault}: {took:.0f} ms (a step: {step:.1f} ms)", flush=True)


def planned(args: argparse.Namespace, system: str, trials: Sequence[dict[str, Any]]) -> list[str]:
    """The faults of the next job of a system: both in turns, as far as they are missing."""
    had = {fault: sum((t["system"], t["fault"]) == (system, fault) for t in trials) for fault in FAULTS}
    missing = {fault: min(args.faults_per_job, args.trials - had[fault]) for fault in FAULTS}
    longest = max(missing.values())
    return [fault for turn in range(longest) for fault in FAULTS if turn < missing[fault]]


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    size = Size(args.workers, args.microbatches, args.samples)
    trials: list[dict[str, Any]] = []
    failed: list[dict[str, str]] = []
    rounds = -(-args.trials // args.faults_per_job)
    began = time.time()
    for turn in range(rounds + MORE_ROUNDS):
        plans = {system: plan for system in args.systems if (plan := planned(args, system, trials))}
        if not plans:
            break
        for system, plan in plans.items():
            # The same victims and moments for all.
            chance = random.Random(f"{args.seed} {turn}")
            try:
                run_job(system, size, plan, folder / f"{turn}-{system}", chance, trials)
            except JobFailed as error:
                failed.append({"system": system, "error": str(error)})
                print(f"{system}: FAILED, {error}", flush=True)
        print(f"round {turn + 1} is over after {time.time() - began:.0f} s", flush=True)
    limits = {"tuned_ms": TUNED_MS, "save_every": SAVE_EVERY, "group_timeout_s": GROUP_TIMEOUT_S}
    return {"trials": trials, "failed": failed, "limits": limits}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20, help="of each system and fault (default: 20)")
    parser.add_argument("--faults-per-job", type=int, default=5, help="of each kind in one job (default: 5)")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8, help="a multiple of --workers")
    parser.add_argument("--samples", type=int, default=36, help="samples of one microbatch (default: 36, 35 ms a step)")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--seed", type=int, default=0, help="for the victims and the moments of the faults")
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(conduct("poster", parse(), run))
