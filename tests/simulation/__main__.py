"""Simulate jobs.

    python -m tests.simulation --seeds 1000             seeds 0 to 999, and which faults struck in which states
    python -m tests.simulation --seeds 1000 --first 5000
    python -m tests.simulation --seed 17                one of them again, with everything that happened

Exit code 1 if a promise did not hold.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

from .coverage import reached, table
from .faults import FAULTS
from .seeds import run_seed


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Simulate jobs.")
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="run this one alone, and tell its story")
    parser.add_argument("--quiet", action="store_true", help="without what is logged, whose paths differ each time")
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    if options.seed is not None:
        return _tell(options.seed, options.quiet)
    began, began_cpu = time.monotonic(), time.process_time()
    results = []
    for seed in range(options.first, options.first + options.seeds):
        results.append(run_seed(seed))
        if results[-1].violation is not None:
            print(f"seed {seed}: {results[-1].violation}", flush=True)
    strikes = [strike for result in results for strike in result.strikes]
    print(table(strikes, FAULTS))
    wall_s, cpu_s = time.monotonic() - began, time.process_time() - began_cpu
    failed = sum(result.violation is not None for result in results)
    simulated_s = sum(result.seconds for result in results)
    print(
        f"\n{len(results)} seeds, {len(strikes)} faults, {reached(strikes)} pairs of fault and state;"
        f" {simulated_s:.0f} simulated seconds in {wall_s:.1f} s ({cpu_s:.1f} s of CPU):"
        f" {60 * len(results) / cpu_s:.0f} seeds per minute of one core. {failed} violations"
    )
    return 1 if failed else 0


def _tell(seed: int, quiet: bool) -> int:
    logging.disable(logging.CRITICAL if quiet else logging.NOTSET)
    logging.basicConfig(level=logging.WARNING, format="          log: %(name)s: %(message)s", stream=sys.stdout)
    result = run_seed(seed)
    print("\n".join(result.story))
    print(f"{result.steps} steps committed, {result.seconds:.1f} s simulated; {result.violation or 'no violation'}")
    return 1 if result.violation is not None else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
