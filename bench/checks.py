"""Measures what the checks of a script's loop add to a step, after the first ten steps.

In the same workers, blocks of steps alternate with the checks on and off; then steps follow in which the code of the checks
itself is timed, and its median counts. The differences need an idle machine to say something about 0.1 ms. Example, a quick try:

    python bench/checks.py --pairs 10
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.jobs import CraftJob, exit_on_sigterm
from bench.stats import Estimate, paired_ratio

BAR_MS = 0.1
LIMIT_S = 600.0


def median_difference(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(on - off for on, off in pairs)


def per_step(blocks: list[dict[str, Any]], what: str, steps: int) -> Estimate:
    """Return how many milliseconds longer a step is with the checks than without."""
    pairs = [(one, other) if one["on"] else (other, one) for one, other in zip(blocks[::2], blocks[1::2], strict=True)]
    return paired_ratio([(on[what] / steps * 1e3, off[what] / steps * 1e3) for on, off in pairs], median_difference)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--layers", type=int, default=53, help="of batch norm, with three buffers each; ResNet-50 has 53"
    )
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--steps-per-block", type=int, default=20)
    args = parser.parse_args()
    exit_on_sigterm()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "blocks.json"
        names = ("layers", "width", "pairs", "steps_per_block")
        script_args = [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
        with CraftJob(Path(folder) / "job", "checks_worker.py", [*script_args, "--out", str(out)], args.workers) as job:
            job.wait(LIMIT_S)
        found = json.loads(out.read_text())
    blocks, inside = found["blocks"], [each / 1e6 for each in found["inside_ns"]]
    off = [each["wall_s"] / args.steps_per_block * 1e3 for each in blocks if not each["on"]]
    print(f"{len(blocks) // 2} pairs of blocks, {args.workers} workers, a step of {statistics.median(off):.2f} ms")
    cpu = per_step(blocks, "cpu_s", args.steps_per_block)
    wall = per_step(blocks, "wall_s", args.steps_per_block)
    for name, each in (("main thread, on less off", cpu), ("wall clock, on less off", wall)):
        print(f"{name}: {each.value:+.4f} ms per step (95% {each.low:+.4f} to {each.high:+.4f})")
    middle, most = statistics.median(inside), sorted(inside)[int(len(inside) * 0.95)]
    print(f"within the code of the checks: median {middle:.4f} ms per step, 95% of steps at most {most:.4f}")
    met = middle <= BAR_MS and cpu.low <= BAR_MS
    print(f"bar: at most {BAR_MS} ms per step: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
