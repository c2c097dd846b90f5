"""Fuzz jobs with generated scripts.

    python -m tests.fuzz --seed 0 --runs 100        scripts 0 to 99, each under its own kills
    python -m tests.fuzz --seed 17                  one of them again
    python -m tests.fuzz --seed 17 --without average,evaluate --kills none      smaller, to find the cause
    python -m tests.fuzz --seed 17 --show           its text

Exit code 1 if there is a finding.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

from .driver import Driver, Result
from .generator import generate
from .kills import Plan, draw_plan


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz jobs with generated scripts.")
    parser.add_argument("--seed", type=int, default=0, help="of the first script")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--without", default="", help="axes to leave out, separated by commas")
    parser.add_argument("--given", default="", help="axis=option, separated by commas")
    parser.add_argument("--kills", choices=["drawn", "none"], default="drawn")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--show", action="store_true", help="print the script and the plan, and run nothing")
    parser.add_argument("--dir", type=Path, help="where runs go; those that are not findings are removed")
    options = parser.parse_args(arguments)
    without = [axis for axis in options.without.split(",") if axis]
    given = dict(pair.split("=") for pair in options.given.split(",") if pair)
    folder = options.dir or Path(tempfile.mkdtemp(prefix="craft-fuzz-"))
    results = []
    with Driver(folder) as driver:
        for seed in range(options.seed, options.seed + options.runs):
            script = generate(seed, without=without, given=given)
            plan = draw_plan(seed, dict(script.features))
            if options.kills == "none":
                plan = Plan(workers=plan.workers)
            if options.workers:
                plan = replace(plan, workers=options.workers)
            if options.show:
                print(script.text, f"# {plan}", sep="\n")
                continue
            results.append(driver.run(script, plan))
            _tell(results[-1])
    if results:
        print(f"{len(results)} scripts: " + ", ".join(f"{n} {kind}" for kind, n in sorted(_kinds(results).items())))
    return 1 if any(result.verdict.finding for result in results) else 0


def _kinds(results: list[Result]) -> Counter[str]:
    return Counter(result.verdict.kind for result in results)


def _tell(result: Result) -> None:
    if result.verdict.finding:
        print(result, flush=True)
        return
    script = result.script
    print(
        f"{result.verdict.kind} seed {script.seed} ({result.wall_s:.0f} s) {script.mistake or ''}: {result.verdict.detail}"
        f"\n  plan: {result.plan}\n  done: {'; '.join(result.done)}",
        flush=True,
    )
    shutil.rmtree(result.folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
