"""Soak jobs of several seeds, one after the other, and print a row for each.

    python -m tests.chaos --seeds 10 --minutes 6
    python -m tests.chaos --sharded --minutes 20                                       three replicas of two workers
    python -m tests.chaos --seed 4 --seeds 1 --minutes 1 --every 3 --dir soaks        one of them again

Exit code 1 if one of them is not exact, paused for no reason, or leaked.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from .soak import SHARDED, WHOLE
from .verdict import soak_once


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Soak jobs under faults of every kind.")
    parser.add_argument("--seed", type=int, default=1, help="of the first soak")
    parser.add_argument("--seeds", type=int, default=1, help="how many soaks")
    parser.add_argument("--minutes", type=float, default=6.0, help="of each, without its start and end")
    parser.add_argument("--every", type=float, default=5.0, help="mean seconds between two faults of chaos")
    parser.add_argument("--sharded", action="store_true", help="three replicas of two workers, by FSDP2")
    parser.add_argument("--no-checkpoints", action="store_true", help="and nothing that only a checkpoint mends")
    parser.add_argument("--dir", type=Path, help="where their files go; those of a soak without problems are removed")
    options = parser.parse_args(arguments)
    folder = options.dir or Path(tempfile.mkdtemp(prefix="craft-soak-"))
    good = sum(_is_good(folder, seed, options) for seed in range(options.seed, options.seed + options.seeds))
    print(f"{good} of {options.seeds} soaks are exact and without a pause that the journal does not justify")
    return 0 if good == options.seeds else 1


def _is_good(folder: Path, seed: int, options: argparse.Namespace) -> bool:
    place = folder / f"seed{seed}"
    try:
        shape = replace(SHARDED if options.sharded else WHOLE, checkpoints=not options.no_checkpoints)
        verdict = soak_once(place, seed, 60 * options.minutes, options.every, shape)
    except AssertionError as error:
        print(f"seed {seed:<4} DID NOT COME TO ITS END, files in {place}: {error}", flush=True)
        return False
    print(verdict.row, flush=True)
    for problem in verdict.problems:
        print(problem, flush=True)
    if verdict.problems:
        print(f"its files are in {place}", flush=True)
    else:
        shutil.rmtree(place)
    return not verdict.problems


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
