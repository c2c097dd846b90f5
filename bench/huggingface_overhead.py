"""Measures what a failure-free step costs under Hugging Face's Trainer: CraftTrainer against the Trainer under torchrun.

Both jobs are there all the time and take turns with blocks of steps, so that the machine's drift meets both; a block's time is
that of rank 0. The bar: the upper 95% limit of the ratio is at most 1.03. Only a machine that does nothing else tells
anything. Example, a quick try:

    python bench/huggingface_overhead.py --blocks 8
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.commits import Commit
from bench.conduct import conduct
from bench.jobs import BENCH, CraftJob, Job, Member

SCRIPT = "huggingface_fit.py"
LIMIT_S = 900.0
_DISTURBED = 2
"""First blocks that are left out: the other job may still have been starting."""


class TorchrunJob(Job):
    """The same script under torchrun, as a plain Trainer is started."""

    def __init__(self, folder: Path, args: list[str], workers: int) -> None:
        super().__init__(folder)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(workers), "--master-port", str(port)]
        self.start([sys.executable, *launch, BENCH / SCRIPT, *args], "torchrun.log")

    def members(self) -> list[Member]:
        return []

    def commits(self) -> dict[str, list[Commit]]:
        return {}


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    turns = {system: folder / f"turn-{system}" for system in ("craft", "ddp")}
    for path in turns.values():
        os.mkfifo(path)
    given = {system: script_args(system, turns, args, folder) for system in turns}
    craft = CraftJob(folder / "craft", SCRIPT, given["craft"], args.workers)
    with craft, TorchrunJob(folder / "ddp", given["ddp"], args.workers) as ddp:
        first = os.open(turns["craft"], os.O_RDWR)
        os.write(first, b"1")
        craft.wait(LIMIT_S)
        ddp.wait(LIMIT_S)
        os.close(first)
    spans = {system: json.loads((folder / f"{system}.json").read_text())[_DISTURBED:] for system in turns}
    blocks = [{"system_s": own, "ddp_s": ddp} for own, ddp in zip(spans["craft"], spans["ddp"], strict=True)]
    step_ms = sum(spans["ddp"]) / len(spans["ddp"]) / args.steps_per_block * 1e3
    return {"cells": [{"workers": args.workers, "step_ms": step_ms, "blocks": {"craft": blocks}}], "failed": []}


def script_args(system: str, turns: dict[str, Path], args: argparse.Namespace, folder: Path) -> list[str]:
    other = next(each for each in turns if each != system)
    options = {
        "--system": system,
        "--own-turn": turns[system],
        "--other-turn": turns[other],
        "--out": folder / f"{system}.json",
        "--blocks": args.blocks,
        "--steps-per-block": args.steps_per_block,
        "--batch": args.batch,
        "--length": args.length,
        "--width": args.width,
    }
    return [str(part) for option in options.items() for part in option]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--steps-per-block", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="samples of a worker's batch")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--width", type=int, default=256, help="of the model")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return conduct("huggingface_overhead", parser.parse_args(), run)


if __name__ == "__main__":
    sys.exit(main())
