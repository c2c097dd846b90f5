"""Measures what CRAFT adds to a step that is too short to hide anything: CRAFT against DDP, a model of width 128.

Inside the same processes blocks of steps alternate between the two sides. With ``--profile``, further steps run under
cProfile in the worker of rank 0, and a table shows in which file their time goes. Example, a quick try:

    python bench/fixed_cost.py --pairs 10 --profile
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.jobs import CraftJob, exit_on_sigterm
from bench.stats import paired_ratio

BAR_MS = 0.8
LIMIT_S = 300.0


def median_difference(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(craft - ddp for craft, ddp in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=8, help="per worker and step")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--steps-per-block", type=int, default=50)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--profiled-steps", type=int, default=500)
    args = parser.parse_args()
    exit_on_sigterm()
    with tempfile.TemporaryDirectory() as folder:
        out, meet = Path(folder) / "blocks.json", Path(folder) / "meet"
        names = ("samples", "pairs", "steps_per_block", "profiled_steps")
        options = [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
        options += ["--blocks", str(out), "--meet", str(meet), *(["--profile"] if args.profile else [])]
        with CraftJob(Path(folder) / "job", "fixed_cost_worker.py", options, args.workers) as job:
            job.wait(LIMIT_S)
        found = json.loads(out.read_text())
    pairs = [
        (each["craft_s"] / args.steps_per_block * 1e3, each["ddp_s"] / args.steps_per_block * 1e3)
        for each in found["blocks"]
    ]
    more = paired_ratio(pairs, median_difference)
    ddp = statistics.median(each for _, each in pairs)
    print(
        f"{len(pairs)} pairs of blocks of {args.steps_per_block} steps, {args.workers} workers: DDP {ddp:.2f} ms a step"
    )
    print(f"CRAFT takes {more.value:.2f} ms more (95%: {more.low:.2f} to {more.high:.2f}; bar {BAR_MS} ms)")
    for row in found.get("profile", []):
        print(f"{row['us']:8.0f} us  {row['calls']:6.1f} calls  {row['file']}")
    return 0 if more.value <= BAR_MS else 1


if __name__ == "__main__":
    sys.exit(main())
