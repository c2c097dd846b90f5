"""Measures what a failure-free step costs: CRAFT against DistributedDataParallel over Gloo, and torchft beside it.

Inside the same processes, blocks of steps alternate between the two sides of a comparison, so that the machine's drift
meets both; a block's time is that of its slowest worker. The jobs of CRAFT and torchft alternate in turn. Example, a
quick try:

    python bench/overhead.py --workers 2 --step-ms 30 --pairs 6
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.jobs import CraftJob, Job, TorchftJob, exit_on_sigterm
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


def run_job(system: str, cell: Cell, pairs: int, args: argparse.Namespace, folder: Path) -> None:
    """Run one job of ``pairs`` block pairs and add them to ``cell``."""
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
        # Nobody may start alone, or one worker would be a step ahead of the others and of their barriers.
        job = TorchftJob(folder, SCRIPT, script_args, cell.workers, min_replicas=cell.workers)
    # Twice the step's target leaves room for a slow system; a stuck one still ends.
    expected_s = 2 * pairs * args.steps_per_block * cell.step_ms / 1e3
    with job:
        job.wait(START_LIMIT_S + 3 * expected_s)
    found = json.loads(blocks.read_text())
    cell.samples = found["samples"]
    cell.blocks.setdefault(system, []).extend(found["blocks"])


def pairs_in_round(total: int, turn: int, rounds: int) -> int:
    return total * (turn + 1) // rounds - total * turn // rounds


def run(args: argparse.Namespace, folder: Path) -> list[Cell]:
    cells = [Cell(workers, step_ms, args.samples) for step_ms in args.step_ms for workers in args.workers]
    for turn in range(args.rounds):
        for number, cell in enumerate(cells):
            for system in args.systems:
                wanted = args.pairs if system == "craft" else args.torchft_pairs
                # Long steps average over more of the noise in one block, and would take the whole time.
                wanted = wanted if cell.step_ms < 60 else (wanted + 1) // 2
                pairs = pairs_in_round(wanted, turn, args.rounds)
                if pairs == 0:
                    continue
                run_job(system, cell, pairs, args, folder / f"{turn}-{number}-{system}")
                last = cell.blocks[system][-pairs:]
                ratio = sum(block["system_s"] for block in last) / sum(block["ddp_s"] for block in last)
                step_ms = sum(block["ddp_s"] for block in last) / (pairs * args.steps_per_block) * 1e3
                what = f"round {turn + 1} {system}, {cell.workers} workers, {cell.samples} samples"
                print(f"{what}: DDP step {step_ms:.1f} ms, ratio of means {ratio:.3f}", flush=True)
    return cells


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--step-ms", type=float, nargs="+", default=[30.0, 120.0], help="DDP steps to calibrate for")
    parser.add_argument("--pairs", type=int, default=40, help="block pairs of CRAFT; half as many for steps over 60 ms")
    parser.add_argument("--torchft-pairs", type=int, default=12, help="the same for torchft")
    parser.add_argument(
        "--rounds", type=int, default=2, help="jobs that the pairs are spread over, per cell and system"
    )
    parser.add_argument("--steps-per-block", type=int, default=20)
    parser.add_argument("--samples", type=int, default=0, help="samples per worker, instead of a calibration")
    parser.add_argument("--systems", nargs="+", choices=["craft", "torchft"], default=["craft", "torchft"])
    parser.add_argument("--keep", type=Path, help="keep the jobs' folders here instead of in a temporary one")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


def main() -> int:
    args = parse()
    exit_on_sigterm()
    result: dict[str, Any] = {"benchmark": "overhead", "environment": environment()}
    with tempfile.TemporaryDirectory() as temporary:
        cells = run(args, args.keep or Path(temporary))
    result["settings"] = {"steps_per_block": args.steps_per_block, "rounds": args.rounds}
    result["cells"] = [vars(cell) for cell in cells]
    return finish(result, args.out)


if __name__ == "__main__":
    sys.exit(main())
