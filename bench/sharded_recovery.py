"""SIGKILL of one worker of a sharded job: CRAFT, and torchft, whose group is started again.

``bench/sharded.py recovery`` calls ``measure``. The systems take turns; each job gets several kills, one after the other, each
once all replicas were there undisturbed for a while. CRAFT's jobs run to their end and are compared with an undisturbed one.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from bench.commits import Commit, recovery_of, step_time
from bench.jobs import JobFailed
from bench.models import fit_samples
from bench.poster import UNDISTURBED, undisturbed
from bench.recovery import wait_until
from bench.sharded_jobs import TUNED_MS, GroupedTorchft, Length, ReplicaMember, ShardedCraft
from bench.sharded_models import REPLICAS, SHARDS

from craft.testing.history import check

START_LIMIT_S = 180.0
RECOVERY_LIMIT_S = 120.0
SPREAD_STEPS = 10
"""A kill comes within so many steps once all replicas were there undisturbed."""
FIRST_STEPS, STEPS_PER_KILL = 80, 120
"""How long a job is: more than what the kills need, since it has to end for its bits to be compared."""

Sharded = ShardedCraft | GroupedTorchft
SYSTEMS: dict[str, Callable[[Path, Length], Sharded]] = {
    "craft": ShardedCraft,
    "torchft": GroupedTorchft,
    "torchft-tuned": lambda folder, length: GroupedTorchft(folder, length, TUNED_MS),
}


def wait_full(job: Sharded, since: float) -> list[ReplicaMember]:
    """Wait until all replicas are there and undisturbed since a moment; returns the workers."""
    found: list[list[ReplicaMember]] = []

    def ready() -> bool:
        steady = {name for name, each in job.commits().items() if undisturbed(each, job.full, since)}
        members = job.replicas() if len(steady) >= REPLICAS * SHARDS else []
        whole = len(members) == REPLICAS * SHARDS and {each.name for each in members} <= steady
        found.extend([members] if whole else [])
        return whole

    wait_until(job, ready, f"{UNDISTURBED} undisturbed commits of all replicas", START_LIMIT_S)
    return found[0]


def full_again(killed: float, survivors: Mapping[str, Sequence[Commit]], full: int) -> float | None:
    """When all replicas computed a step again, in seconds since ``killed``; None: not yet."""
    firsts = []
    for commits in survivors.values():
        before = [each for each in commits if each.time_s <= killed]
        newer = [each for each in commits if each.time_s > killed and each.generation > before[-1].generation]
        # With a plan in the line, all workers may be members before all replicas compute.
        whole = [each.time_s for each in newer if each.world_size == full and each.owners in (0, REPLICAS)]
        firsts.append(min(whole, default=float("inf")))
    return min(firsts) - killed if firsts and min(firsts) < float("inf") else None


def restart_at_once(job: Sharded) -> None:
    """Do what torchft's launcher does; CRAFT replaces its workers itself."""
    if isinstance(job, GroupedTorchft):
        wait_until(job, job.restart_lost, "end of the process that was killed", 10.0)


def script_start(job: ShardedCraft, known: set[str]) -> float:
    """How long the newcomer's script ran until it asked to join."""
    joined = [e for e in job.journal() if e.get("event") == "WorkerJoined" and e["member"]["worker_id"] not in known]
    return float(joined[-1]["time"]) - psutil.Process(joined[-1]["pid"]).create_time()


def strike(job: Sharded, chance: random.Random, since: float) -> tuple[dict[str, float], float]:
    """Kill one worker; returns what came of it, and when it was."""
    members = wait_full(job, since)
    known = set(job.commits())
    victim = members[chance.randrange(len(members))]
    others = {each.name for each in members if each.replica != victim.replica}
    step_s = statistics.median(step_time(job.commits()[name][-UNDISTURBED:]) for name in others)
    time.sleep(chance.uniform(0.0, SPREAD_STEPS * step_s))
    killed = time.time()
    os.kill(victim.pid, signal.SIGKILL)
    restart_at_once(job)
    found: list[tuple[float, float]] = []

    def over() -> bool:
        survivors = {name: each for name, each in job.commits().items() if name in others}
        recovery, whole = recovery_of(killed, survivors), full_again(killed, survivors, job.full)
        if recovery is not None and whole is not None:
            found.append((recovery.recovery_s, whole))
        return bool(found)

    # Nothing is read at first: reading takes processor time from those who recover.
    time.sleep(1.0)
    wait_until(job, over, "commit of all replicas", RECOVERY_LIMIT_S)
    recovery_s, full_s = found[0]
    figures = {"recovery_s": recovery_s, "full_s": full_s, "step_s": step_s}
    if isinstance(job, ShardedCraft):
        figures["script_s"] = script_start(job, known)
        kept = {each.pid for each in members} - {victim.pid}
        if not kept <= {each.pid for each in job.replicas()}:
            raise JobFailed(f"more than one process was replaced\n{job.log_tail()}")
    return figures, killed


def length_of(kills: int, samples: int) -> Length:
    return Length(samples, FIRST_STEPS + STEPS_PER_KILL * kills)


def finish_exact(job: ShardedCraft, reference: Path) -> bool:
    """Wait for the job's end; returns whether its history is right and its bits are those of ``reference``."""
    job.wait(START_LIMIT_S + 60.0)
    violations = check(job.run_dir, reference).violations
    for each in violations:
        print(f"craft: {each}", flush=True)
    return not violations


def calibrate(args: argparse.Namespace, folder: Path) -> int:
    """Return the samples per worker that make an undisturbed step of CRAFT take ``--step-ms``."""

    def measure(samples: int) -> float:
        with ShardedCraft(folder / f"calibrate-{samples}-{time.monotonic_ns()}", Length(samples, 100_000)) as job:
            wait_full(job, 0.0)
            step_s = statistics.median(step_time(commits) for commits in job.commits().values())
        print(f"calibration: {samples} samples per worker and step, {step_s * 1e3:.1f} ms a step", flush=True)
        return step_s

    return fit_samples(args.step_ms / 1e3, measure, sizes=(8, 32, 128))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the figures of every kill; jobs that failed must not end the benchmark."""
    samples = args.samples or calibrate(args, folder)
    kills: dict[str, list[dict[str, float]]] = {system: [] for system in args.systems}
    failed: list[dict[str, str]] = []
    exact: list[bool] = []
    reference = ShardedCraft(folder / "reference", length_of(args.kills_per_job, samples), replicas=1)
    with reference:
        reference.wait(START_LIMIT_S + 20 * args.kills_per_job * STEPS_PER_KILL * args.step_ms / 1e3)
    wanted = {system: args.kills if system == "craft" else args.torchft_kills for system in args.systems}
    for turn in range(-(-args.kills // args.kills_per_job)):
        for system in args.systems:
            number = min(args.kills_per_job, wanted[system] - turn * args.kills_per_job)
            chance = random.Random(f"{args.seed} {turn}")
            if number <= 0:
                continue
            try:
                # All jobs of CRAFT have the length of the reference.
                with SYSTEMS[system](folder / f"{turn}-{system}", length_of(args.kills_per_job, samples)) as job:
                    since = 0.0
                    for _ in range(number):
                        figures, since = strike(job, chance, since)
                        kills[system].append(figures)
                        shown = ", ".join(f"{key[:-2]} {value * 1e3:.0f} ms" for key, value in figures.items())
                        print(f"round {turn + 1} {system}: {shown}", flush=True)
                    if isinstance(job, ShardedCraft):
                        exact.append(finish_exact(job, reference.run_dir))
            except JobFailed as error:
                failed.append({"system": system, "error": str(error)})
                print(f"round {turn + 1} {system}: FAILED, {error}", flush=True)
    return {"kills": kills, "samples": samples, "exact": exact, "failed": failed, "tuned_ms": TUNED_MS}
