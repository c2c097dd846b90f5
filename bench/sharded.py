"""Sharded jobs, 2 replicas of 2 workers with FSDP2: what a SIGKILL costs, and what a step costs when nothing fails.

``recovery``: SIGKILL of one worker to the other replica's next commit, and to the full number of replicas, beside torchft.
``overhead``: the step against torch's own HSDP in alternating blocks, and the memory of both. Examples, quick tries:

    python bench/sharded.py recovery --kills 2 --torchft-kills 1 --kills-per-job 2
    python bench/sharded.py overhead --pairs 4 --memory-rounds 0
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import sharded_overhead, sharded_recovery
from bench.conduct import conduct


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    recovery = parts.add_parser("recovery", help="SIGKILL of one worker")
    recovery.add_argument("--kills", type=int, default=20, help="of CRAFT's workers (default: 20)")
    recovery.add_argument("--torchft-kills", type=int, default=10, help="of each torchft variant (default: 10)")
    recovery.add_argument("--kills-per-job", type=int, default=5)
    recovery.add_argument("--step-ms", type=float, default=100.0, help="step of CRAFT to calibrate for (default: 100)")
    recovery.add_argument("--samples", type=int, default=0, help="of one worker and step, instead of a calibration")
    names = list(sharded_recovery.SYSTEMS)
    recovery.add_argument("--systems", nargs="+", choices=names, default=names)
    recovery.add_argument("--seed", type=int, default=0, help="for the victims and the moments of the kills")
    overhead = parts.add_parser("overhead", help="the failure-free step against torch's HSDP")
    overhead.add_argument("--pairs", type=int, default=40, help="pairs of blocks (default: 40)")
    overhead.add_argument("--rounds", type=int, default=2, help="jobs that the pairs are spread over (default: 2)")
    overhead.add_argument("--steps-per-block", type=int, default=20)
    overhead.add_argument("--step-ms", type=float, default=150.0, help="step of HSDP to calibrate for (default: 150)")
    overhead.add_argument("--samples", type=int, default=0, help="of one worker and step, instead of a calibration")
    overhead.add_argument("--memory-rounds", type=int, default=2, help="jobs of each width to take memory from")
    overhead.add_argument("--widths", type=int, nargs=2, default=[1024, 2048], help="of the models for memory")
    overhead.add_argument("--profile", type=Path, help="folder for a profile of every worker's steps")
    for part in (recovery, overhead):
        part.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    measure = {"recovery": sharded_recovery.measure, "overhead": sharded_overhead.measure}[arguments.part]
    sys.exit(conduct(f"sharded_{arguments.part}", arguments, measure))
