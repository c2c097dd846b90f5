"""Measures what all built-in techniques cost where nothing fails: processor time per step and worker, all on against all off.

Jobs of both kinds take turns. "On" is every technique at work: checkpoints at the interval that CRAFT chooses, numbers looked at,
stragglers measured, rules for alerts. "Off" is what is left when all is switched off that can be. The
model is small, since what it computes varies from job to job by more than all techniques cost. Example, a quick try:

    python bench/techniques.py --rounds 2 --steps 200
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.conduct import conduct
from bench.jobs import BENCH, CraftJob, JobFailed

from craft.decide.techniques import BUILT_IN

WORKERS = 4
MICROBATCHES = 8
RULES = '[[alerts]]\nmatch = { alertname = "Any" }\nanswer = "report"\n'


def options(kind: str, folder: Path) -> list[str]:
    """Flags of ``craft run``."""
    if kind == "off":
        return [flag for each in BUILT_IN if each.optional for flag in ("--disable", each.name)]
    config = folder / "craft.toml"
    config.write_text(RULES)
    return ["--config", str(config), "--checkpoints", str(folder / "store"), "--on-divergence", "skip"]


def measure(kind: str, args: argparse.Namespace, folder: Path) -> list[float]:
    """Seconds of processor time per step, for each worker of one job."""
    costs = folder / "costs"
    costs.mkdir(parents=True)
    script = ["--samples", str(args.samples), "--microbatches", str(MICROBATCHES), "--steps", str(args.steps)]
    script += ["--warm-up", str(args.warm_up), "--costs", str(costs), "--hidden", str(args.hidden)]
    with CraftJob(folder / "job", "techniques_craft.py", script, WORKERS, options(kind, folder)) as job:
        job.wait(600.0)
    return [float(json.loads(file.read_text())) for file in sorted(costs.iterdir())]


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    found: dict[str, list[list[float]]] = {"on": [], "off": []}
    failed: list[dict[str, str]] = []
    for number in range(args.rounds):
        for kind in ("on", "off") if number % 2 else ("off", "on"):
            try:
                costs = measure(kind, args, folder / f"{number}-{kind}")
            except JobFailed as error:
                failed.append({"system": "craft", "error": str(error)})
                print(f"FAILED: {error}", flush=True)
                continue
            found[kind].append(costs)
            print(
                f"{kind:<4} {', '.join(f'{1e3 * cost:.3f}' for cost in costs)} ms of each worker per step", flush=True
            )
    return {"costs": found, "failed": failed}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="jobs of each kind")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--warm-up", type=int, default=100, help="steps that do not count")
    parser.add_argument("--hidden", type=int, default=64, help="width of the model")
    parser.add_argument("--samples", type=int, default=4, help="samples of one microbatch")
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(conduct("techniques", parse(), run))
