"""Measures what a failure-free step costs: CRAFT against DistributedDataParallel over Gloo, and torchft beside it.

Inside the same processes, blocks of steps alternate between the two sides of a comparison, so that the machine's drift
meets both; a block's time is that of its slowest worker. The jobs of CRAFT and torchft alternate in turn. Example, a
quick try:

    python bench/overhead.py --workers 2 --step-ms 30 --pairs 6
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.jobs import CraftJob, Job, JobFailed, TorchftJob, exit_on_sigterm
from bench.report import environment, finish

SCRIPT = "overhead_worker.py"
START_LIMIT_S = 90.0


@dataclass
class Cell:
    """One combination of workers and step time, with the block pairs found so far."""

    workers: int
    step_ms: float
    samples: int = 0
    """Per worker and step; 0 until the cell's first job has calibrated it."""
    blocks: dict[str, list[dict[str, float]]] = field(default_factory=dict)


def run_job(system: str, cell: Cell, pairs: int, args: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """Run one job and return its block pairs; the first job of ``cell`` calibrates it."""
    blocks = folder / "blocks.json"
    options = {
        "--system": system,
        "--meet": folder / "meet",
        "--step-ms": cell.step_ms,
        "--samples": cell.samples,
        "--pairs": pairs,
        "--steps-per-block": args.steps_per_block,
        "--blocks": blocks,
    }
    script_args = [str(part) for option in options.items() for part in option]
    job: Job
    if system == "craft":
        job = CraftJob(folder, SCRIPT, script_args, cell.workers)
    else:
        # A job of DDP against itself is started in the same way, and leaves the lighthouse alone.
        # Nobody may start alone, or one worker would be a step ahead of the others and of their barriers.
        job = TorchftJob(folder, SCRIPT, script_args, cell.workers, min_replicas=cell.workers)
    # Twice the step's target leaves room for a slow system; a stuck one still ends.
    expected_s = 2 * pairs * args.steps_per_block * cell.step_ms / 1e3
    with job:
        job.wait(START_LIMIT_S + 3 * expected_s)
    found = json.loads(blocks.read_text())
    cell.samples = found["samples"]
    pairs_found: list[dict[str, float]] = found["blocks"]
    return pairs_found


def schedule(args: argparse.Namespace, cells: list[Cell]) -> Iterator[tuple[str, Cell, int]]:
    """Yield (system, cell, pairs): the systems take turns, and every cell comes once a round."""
    for turn, cell, system in itertools.product(range(args.rounds), cells, args.systems):
        wanted = args.pairs if system == "craft" else args.torchft_pairs
        # Long steps average over more of the noise in one block, and would take the whole time.
        wanted = wanted if cell.step_ms < 60 else (wanted + 1) // 2
        pairs = wanted * (turn + 1) // args.rounds - wanted * turn // args.rounds
        if pairs:
            yield system, cell, pairs


def run(args: argparse.Namespace, folder: Path) -> tuple[list[Cell], list[dict[str, str]]]:
    """Return the cells, and the jobs that failed, which must not end the benchmark."""
    failed = []
    cells = [Cell(workers, step_ms, args.samples) for step_ms in args.step_ms for workers in args.workers]
    for number, (system, cell, pairs) in enumerate(schedule(args, cells)):
        what = f"{system}, {cell.workers} workers, {cell.step_ms:.0f} ms"
        try:
            blocks = run_job(system, cell, pairs, args, folder / f"{number}-{system}")
        except JobFailed as error:
            failed.append({"system": system, "error": str(error)})
            print(f"{what}: FAILED, {error}", flush=True)
            continue
        cell.blocks.setdefault(system, []).extend(blocks)
        ddp_s, system_s = sum(block["ddp_s"] for block in blocks), sum(block["system_s"] for block in blocks)
        step_ms = ddp_s / (pairs * args.steps_per_block) * 1e3
        figures = f"DDP step {step_ms:.1f} ms, {pairs} pairs, ratio of means {system_s / ddp_s:.3f}"
        print(f"{what} ({cell.samples} samples per worker): {figures}", flush=True)
    return cells, failed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--step-ms", type=float, nargs="+", default=[30.0, 120.0], help="DDP steps to calibrate for")
    parser.add_argument("--pairs", type=int, default=50, help="block pairs of CRAFT; half as many for steps over 60 ms")
    parser.add_argument("--torchft-pairs", type=int, default=12, help="the same for torchft")
    parser.add_argument(
        "--rounds", type=int, default=2, help="jobs that the pairs are spread over, per cell and system"
    )
    parser.add_argument("--steps-per-block", type=int, default=20)
    parser.add_argument("--samples", type=int, default=0, help="samples per worker, instead of a calibration")
    parser.add_argument("--systems", nargs="+", choices=["craft", "torchft", "ddp"], default=["craft", "torchft"])
    parser.add_argument("--keep", type=Path, help="keep the jobs' folders here instead of in a temporary one")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


def main() -> int:
    args = parse()
    exit_on_sigterm()
    result: dict[str, Any] = {"benchmark": "overhead", "environment": environment()}
    with tempfile.TemporaryDirectory() as temporary:
        cells, result["failed"] = run(args, (args.keep or Path(temporary)).resolve())
    result["settings"] = {"steps_per_block": args.steps_per_block, "rounds": args.rounds}
    result["cells"] = [vars(cell) for cell in cells]
    return finish(result, args.out)


if __name__ == "__main__":
    sys.exit(main())
