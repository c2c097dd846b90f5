"""Time to train under failures: a sharded job with a SIGKILL every 20 s, under CRAFT, torchft, and torchrun with checkpoints.

Each system trains the same number of samples twice: undisturbed, and with a SIGKILL of one of its processes every so many
seconds. Measured is the time from the first commit to the last. Runs that are done are kept in ``completion.part.json`` until all
are: the same command goes on where it was interrupted. Examples, a quick try and the long one:

    python bench/completion.py --seconds 30 --every 10 --systems craft
    python bench/completion.py --minutes 5
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.commits import Commit
from bench.conduct import conduct
from bench.jobs import BENCH, JobFailed
from bench.recovery import wait_until
from bench.sharded_jobs import SAVE_EVERY, TUNED_MS, GroupedTorchft, Length, ShardedCraft, ShardedTorchrun
from bench.sharded_models import REPLICAS, SHARDS, final_loss
from bench.sharded_recovery import START_LIMIT_S, calibrate

from craft.protocol.errors import CraftError
from craft.testing.history import check

Trained = ShardedCraft | GroupedTorchft | ShardedTorchrun
SYSTEMS: dict[str, Callable[[Path, Length], Trained]] = {
    "craft": ShardedCraft,
    "torchft": GroupedTorchft,
    "torchft-tuned": lambda folder, length: GroupedTorchft(folder, length, TUNED_MS),
    "checkpoint-restart": ShardedTorchrun,
}
USUAL = ["craft", "torchft", "checkpoint-restart"]
KINDS = ("undisturbed", "disturbed")
LONGEST = 12
"""A run that takes so many times what it should is given up."""


def account(system: str, commits: Mapping[str, Sequence[Commit]], length: Length) -> dict[str, int]:
    """Return how many samples were trained, lost (in no step of the final model) and repeated (done, discarded, done again)."""
    if system.startswith("torchft"):
        # Each group has its part of a step; a step counts without the group that was not there.
        groups = {each.step: each.world_size for lines in commits.values() for each in lines}
        share = length.samples * SHARDS
        missing = sum(REPLICAS - each for each in groups.values())
        return {"trained": share * sum(groups.values()), "lost": share * missing, "repeated": 0}
    batch = length.samples * REPLICAS * SHARDS
    steps = {each.step for lines in commits.values() for each in lines}
    again = max((len(lines) - len({each.step for each in lines}) for lines in commits.values()), default=0)
    return {"trained": batch * len(steps), "lost": batch * (length.steps - len(steps)), "repeated": batch * again}


def moments(commits: Mapping[str, Sequence[Commit]]) -> tuple[float, float]:
    """Return when the first and the last commit were."""
    times = [each.time_s for lines in commits.values() for each in lines]
    return min(times), max(times)


def kill_one(job: Trained, chance: random.Random) -> bool:
    """SIGKILL one of the job's processes; False if there is none now."""
    try:
        members = job.members()
    except (CraftError, OSError):
        # The job is ending.
        return False
    if not members or job.ended:
        return False
    os.kill(members[chance.randrange(len(members))].pid, signal.SIGKILL)
    return True


def train(job: Trained, every_s: float | None, limit_s: float, chance: random.Random) -> list[float]:
    """Let a job train to its end, with a SIGKILL every ``every_s`` seconds; returns when they were."""
    wait_until(job, lambda: any(job.commits().values()), "first commit", START_LIMIT_S)
    began, _ = moments(job.commits())
    kills: list[float] = []
    while not job.ended:
        if time.time() > began + limit_s:
            raise JobFailed(f"not finished within {limit_s:.0f} s\n{job.log_tail()}")
        if isinstance(job, GroupedTorchft):
            job.restart_lost()
        due = began + (len(kills) + 1) * every_s if every_s else float("inf")
        if time.time() >= due and kill_one(job, chance):
            kills.append(time.time() - began)
        time.sleep(0.02)
    return kills


def run_once(system: str, kind: str, args: argparse.Namespace, length: Length, folder: Path) -> dict[str, Any]:
    """Train once; returns the figures of the run."""
    every_s = args.every if kind == "disturbed" else None
    with SYSTEMS[system](folder, length) as job:
        # The same victims and moments for all.
        kills = train(job, every_s, LONGEST * args.seconds + START_LIMIT_S, random.Random(args.seed))
        if not isinstance(job, GroupedTorchft):
            job.wait(START_LIMIT_S)
        commits = job.commits()
        found: dict[str, Any] = account(system, commits, length)
        if isinstance(job, ShardedCraft):
            report = check(job.run_dir)
            found |= {"digest": report.digest, "violations": [str(each) for each in report.violations]}
    first, last = moments(commits)
    loss = final_loss(folder)
    return {"system": system, "kind": kind, "seconds": last - first, "kills": kills, "loss": loss, **found}


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Do the runs that are not done yet; those that fail must not end the benchmark."""
    part = args.out / "completion.part.json"
    wanted = {name: getattr(args, name) for name in ("seconds", "every", "step_ms", "seed")}
    kept = json.loads(part.read_text()) if part.exists() else {}
    if kept.get("wanted") != wanted:
        kept = {"wanted": wanted, "samples": args.samples or calibrate(args, folder), "runs": []}
    length = Length(kept["samples"], round(args.seconds / (args.step_ms / 1e3)))
    failed: list[dict[str, str]] = []
    for system in args.systems:
        for kind in KINDS:
            if any((each["system"], each["kind"]) == (system, kind) for each in kept["runs"]):
                continue
            try:
                found = run_once(system, kind, args, length, folder / f"{system}-{kind}")
            except JobFailed as error:
                failed.append({"system": system, "error": str(error)})
                print(f"{system}, {kind}: FAILED, {error}", flush=True)
                continue
            kept["runs"].append(found)
            args.out.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(kept, indent=1) + "\n")
            told = f"{found['seconds']:.1f} s, {len(found['kills'])} kills, {found['lost']} samples lost"
            print(f"{system}, {kind}: {told}, {found['repeated']} repeated, loss {found['loss']:.4f}", flush=True)
    done = {(each["system"], each["kind"]) for each in kept["runs"]}
    if all((system, kind) in done for system in USUAL for kind in KINDS):
        part.unlink(missing_ok=True)
    limits = {"save_every": SAVE_EVERY, "tuned_ms": TUNED_MS}
    size = {"samples": length.samples, "steps": length.steps}
    return {"runs": kept["runs"], "length": size, "limits": limits, "failed": failed}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=100.0, help="what an undisturbed run of CRAFT takes (default: 100)"
    )
    parser.add_argument("--minutes", type=float, help="the same, in minutes")
    parser.add_argument("--every", type=float, default=20.0, help="seconds from one SIGKILL to the next (default: 20)")
    parser.add_argument("--step-ms", type=float, default=100.0, help="step of CRAFT to calibrate for (default: 100)")
    parser.add_argument("--samples", type=int, default=0, help="of one worker and step, instead of a calibration")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=USUAL)
    parser.add_argument("--seed", type=int, default=0, help="for the victims")
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    args = parser.parse_args()
    args.seconds = 60 * args.minutes if args.minutes else args.seconds
    return args


if __name__ == "__main__":
    sys.exit(conduct("completion", parse(), run))
