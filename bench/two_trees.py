"""Compares two checkouts of CRAFT in one run: the step against DDP's, and the recovery from a SIGKILL.

The checkouts take turns, each with its own ``bench/overhead.py`` and ``bench/recovery.py``, in this Python. Example:

    git worktree add /tmp/before COMMIT
    python bench/two_trees.py /tmp/before --rounds 4
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.jobs import exit_on_sigterm
from bench.stats import ratio_of_medians

HERE = Path(__file__).resolve().parents[1]


def run(tree: Path, name: str, options: list[str]) -> dict[str, Any]:
    """Run one benchmark of ``tree``; return what it wrote. Its bars do not matter here."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, f"bench/{name}.py", *options, "--systems", "craft", "--out", out]
        env = {**os.environ, "PYTHONPATH": str(tree / "src")}
        subprocess.run(command, cwd=tree, env=env, stdout=subprocess.DEVNULL, check=False)
        found: dict[str, Any] = json.loads((Path(out) / f"{name}.json").read_text())
        return found


def step_ratios(tree: Path, pairs: int) -> list[float]:
    """Return the ratio of each pair of blocks, CRAFT over DDP; 2 workers, steps of 30 ms."""
    options = ["--workers", "2", "--step-ms", "30", "--pairs", str(pairs), "--rounds", "1"]
    (cell,) = run(tree, "overhead", options)["cells"]
    return [block["system_s"] / block["ddp_s"] for block in cell["blocks"]["craft"]]


def recoveries_ms(tree: Path, kills: int, seed: int) -> list[float]:
    found = run(tree, "recovery", ["--kills", str(kills), "--seed", str(seed)])
    return [kill["recovery_s"] * 1e3 for kill in found["kills"]["craft"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=15, help="block pairs of each checkout and round")
    parser.add_argument("--kills", type=int, default=4, help="of each checkout and round")
    args = parser.parse_args()
    exit_on_sigterm()
    trees = {"before": args.before.resolve(), "after": HERE}
    steps: dict[str, list[float]] = {name: [] for name in trees}
    kills: dict[str, list[float]] = {name: [] for name in trees}
    for turn in range(args.rounds):
        # The first of a pair may find the machine in another state than the second.
        for name in list(trees) if turn % 2 == 0 else list(reversed(trees)):
            steps[name] += step_ratios(trees[name], args.pairs)
            kills[name] += recoveries_ms(trees[name], args.kills, seed=turn)
    worse = False
    for what, found, unit in (("step over DDP's", steps, ""), ("recovery", kills, " ms")):
        ratio = ratio_of_medians(found["after"], found["before"])
        worse = worse or ratio.low > 1
        medians = ", ".join(f"{name} {statistics.median(found[name]):.3f}{unit}" for name in trees)
        print(f"{what}: {medians}; after over before {ratio.value:.3f} (95%: {ratio.low:.3f} to {ratio.high:.3f})")
    return int(worse)


if __name__ == "__main__":
    sys.exit(main())
