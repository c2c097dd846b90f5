"""Measures how long the survivors of a SIGKILL are held up: CRAFT, torchft as its README sets it up, and torchft tuned.

Every job is fresh, with --workers workers, the same model and the same global batch. The systems take turns, so that
a change in the machine's load meets them all. Example, a quick try:

    python bench/recovery.py --kills 3 --torchft-kills 1
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.commits import STEP_WINDOW, Recovery, recovery_of, steady, step_time
from bench.jobs import CraftJob, Job, JobFailed, TorchftJob, exit_on_sigterm
from bench.models import fit_samples
from bench.report import environment, finish

START_LIMIT_S = 90.0
RECOVERY_LIMIT_S = 60.0
SETTLE_COMMITS = 20
"""Commits after which a job counts as started; the undisturbed step is measured after them."""

TUNED_MS = 500
"""torchft tuned: the heartbeat limit of its lighthouse, and its limit for one collective."""


def wait_until(job: Job, ready: Callable[[], bool], what: str, limit_s: float) -> None:
    """Poll, rarely enough not to disturb a job on few cores, until ``ready()``."""
    deadline = time.monotonic() + limit_s
    while not ready():
        if not job.running:
            raise JobFailed(f"the job ended before {what}\n{job.log_tail()}")
        if time.monotonic() > deadline:
            raise JobFailed(f"no {what} within {limit_s:.0f} s\n{job.log_tail()}")
        time.sleep(0.1)


def wait_steady(job: Job, names: set[str] | None, workers: int, length: int) -> None:
    """Wait until the named workers, or any ``workers`` of them, have ``length`` undisturbed commits."""

    def ready() -> bool:
        commits = job.commits()
        chosen = [c for name, c in commits.items() if names is None or name in names]
        return sum(steady(c, workers, length) for c in chosen) >= workers

    wait_until(job, ready, f"{length} undisturbed commits of {workers} workers", START_LIMIT_S)


def measure_kill(job: Job, workers: int, moment: random.Random) -> Recovery:
    """Kill one of the job's ``workers`` at a random moment of an undisturbed stretch, and time the others."""
    wait_steady(job, None, workers, SETTLE_COMMITS)
    members = job.members()
    # Asking who is there costs processor time, so the undisturbed stretch begins after it.
    wait_steady(job, {m.name for m in members}, workers, SETTLE_COMMITS + STEP_WINDOW)
    victim = members[moment.randrange(workers)]
    survivors = {m.name for m in members} - {victim.name}
    time.sleep(moment.uniform(0.0, 0.5))

    kill_time_s = time.time()
    os.kill(victim.pid, signal.SIGKILL)
    recoveries: list[Recovery] = []

    def recovered() -> bool:
        commits = {name: c for name, c in job.commits().items() if name in survivors}
        recovery = recovery_of(kill_time_s, commits)
        recoveries.extend([recovery] if recovery else [])
        return bool(recoveries)

    # Nothing is read while the survivors recover: reading takes processor time from them.
    time.sleep(0.5)
    wait_until(job, recovered, "commit of a newer generation", RECOVERY_LIMIT_S)
    return recoveries[0]


def craft_job(args: argparse.Namespace, samples: int, folder: Path) -> Job:
    script_args = ["--samples", str(samples), "--microbatches", str(args.microbatches)]
    return CraftJob(folder, "recovery_craft.py", script_args, args.workers)


def torchft_job(args: argparse.Namespace, samples: int, folder: Path, tuned_ms: int | None = None) -> Job:
    script_args = ["--commits", str(folder), "--samples", str(samples * args.microbatches // args.workers)]
    script_args += [] if tuned_ms is None else ["--group-timeout-ms", str(tuned_ms)]
    return TorchftJob(folder, "train_torchft.py", script_args, args.workers, tuned_ms)


SYSTEMS: dict[str, Callable[[argparse.Namespace, int, Path], Job]] = {
    "craft": craft_job,
    "torchft": torchft_job,
    "torchft-tuned": partial(torchft_job, tuned_ms=TUNED_MS),
}


def calibrate(args: argparse.Namespace, folder: Path) -> int:
    """Return the samples per microbatch that make an undisturbed step of the first system take ``--step-ms``."""

    def measure(samples: int) -> float:
        with SYSTEMS[args.systems[0]](args, samples, folder / f"calibrate-{samples}-{time.monotonic_ns()}") as job:
            wait_steady(job, None, args.workers, SETTLE_COMMITS + STEP_WINDOW)
            step_s = sorted(step_time(commits) for commits in job.commits().values())[args.workers // 2]
        print(f"calibration: {samples} samples per microbatch, {step_s * 1e3:.1f} ms a step", flush=True)
        return float(step_s)

    return fit_samples(args.step_ms / 1e3, measure, sizes=(8, 32, 128))


def schedule(args: argparse.Namespace) -> Iterator[tuple[int, str]]:
    """Yield (round, system): one CRAFT job a round, torchft's jobs spread evenly over the rounds."""
    for turn in range(args.kills):
        for system in args.systems:
            wanted = args.kills if system == "craft" else args.torchft_kills
            if (turn + 1) * wanted // args.kills > turn * wanted // args.kills:
                yield turn, system


def run(args: argparse.Namespace, folder: Path) -> tuple[dict[str, list[Recovery]], list[dict[str, str]]]:
    """Return the recoveries of each system, and the jobs that failed, which must not end the benchmark."""
    found: dict[str, list[Recovery]] = {system: [] for system in args.systems}
    failed = []
    for turn, system in schedule(args):
        moment = random.Random(f"{args.seed} {turn}")
        try:
            with SYSTEMS[system](args, args.samples, folder / f"{turn}-{system}") as job:
                for lost in range(args.kills_per_job):
                    recovery = measure_kill(job, args.workers - lost, moment)
                    found[system].append(recovery)
                    figures = f"step {recovery.step_s * 1e3:.1f} ms, recovery {recovery.recovery_s * 1e3:.1f} ms"
                    print(f"round {turn + 1} {system}: {figures}", flush=True)
        except JobFailed as error:
            failed.append({"system": system, "error": str(error)})
            print(f"round {turn + 1} {system}: FAILED, {error}", flush=True)
    return found, failed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="jobs of CRAFT, each with its kill (default: 20)")
    parser.add_argument("--torchft-kills", type=int, default=10, help="the same for each torchft variant (default: 10)")
    parser.add_argument("--kills-per-job", type=int, default=1, help="workers to kill, one after another, in one job")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8, help="a multiple of --workers")
    parser.add_argument("--step-ms", type=float, default=35.0, help="undisturbed step to calibrate for (default: 35)")
    parser.add_argument("--samples", type=int, help="samples per microbatch, instead of a calibration")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--seed", type=int, default=0, help="for the victims and the moments of the kills")
    parser.add_argument("--keep", type=Path, help="keep the jobs' folders here instead of in a temporary one")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.microbatches % args.workers:
        parser.error("--microbatches must be a multiple of --workers, so that torchft gets the same global batch")
    return args


def main() -> int:
    args = parse()
    exit_on_sigterm()
    result: dict[str, Any] = {"benchmark": "recovery", "environment": environment()}
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.keep or Path(temporary)).resolve()
        args.samples = args.samples or calibrate(args, folder)
        found, result["failed"] = run(args, folder)
    settings = ("workers", "microbatches", "samples", "kills_per_job", "step_ms", "seed")
    result["settings"] = {name: getattr(args, name) for name in settings} | {"tuned_ms": TUNED_MS}
    result["kills"] = {system: [asdict(recovery) for recovery in kills] for system, kills in found.items()}
    return finish(result, args.out)


if __name__ == "__main__":
    sys.exit(main())
