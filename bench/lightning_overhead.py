"""Measures what a failure-free step costs under Lightning: ``strategy="craft"`` against its own ``"ddp"``, over Gloo.

Inside the same processes, blocks of steps of the two trainers alternate, so that the machine's drift meets both; a block's time
is that of its slowest worker. Example, a quick try:

    python bench/lightning_overhead.py --pairs 6 --rounds 1
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

START_LIMIT_S = 120.0


def measure(samples: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run one job; return its samples per worker and its block pairs."""
    blocks = folder / "blocks.json"
    options = {
        "--meet": folder / "meet",
        "--step-ms": args.step_ms,
        "--samples": samples,
        "--pairs": args.pairs // args.rounds,
        "--steps-per-block": args.steps_per_block,
        "--blocks": blocks,
    }
    script = [str(part) for option in options.items() for part in option]
    expected_s = 2 * args.pairs * args.steps_per_block * args.step_ms / 1e3
    with CraftJob(folder, "lightning_fit.py", script, args.workers) as job:
        job.wait(START_LIMIT_S + 3 * expected_s)
    found: dict[str, Any] = json.loads(blocks.read_text())
    return found


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    blocks: list[dict[str, float]] = []
    failed: list[dict[str, str]] = []
    samples = args.samples
    for number in range(args.rounds):
        try:
            found = measure(samples, args, folder / str(number))
        except JobFailed as error:
            failed.append({"system": "craft", "error": str(error)})
            print(f"FAILED: {error}", flush=True)
            continue
        samples, new = found["samples"], found["blocks"]
        blocks += new
        ddp_s, craft_s = sum(block["ddp_s"] for block in new), sum(block["system_s"] for block in new)
        step_ms = ddp_s / (len(new) * args.steps_per_block) * 1e3
        figures = f"ddp step {step_ms:.1f} ms, {len(new)} pairs, ratio of means {craft_s / ddp_s:.3f}"
        print(f"{args.workers} workers ({samples} samples per worker): {figures}", flush=True)
    return {"blocks": blocks, "samples": samples, "failed": failed}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=30.0, help="the step under ddp to calibrate for")
    parser.add_argument("--pairs", type=int, default=60, help="pairs of blocks")
    parser.add_argument("--rounds", type=int, default=2, help="jobs that the pairs are spread over")
    parser.add_argument("--steps-per-block", type=int, default=20)
    parser.add_argument("--samples", type=int, default=0, help="samples per worker, instead of a calibration")
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(conduct("lightning_overhead", parse(), run))
