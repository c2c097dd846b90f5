"""The failure-free step of CRAFT's sharded replicas against torch's own HSDP, and the memory of both.

``bench/sharded.py overhead`` calls ``measure``. Two sets of four processes train in turns: the benchmark tells one side through
a store that a block may begin, waits until all four have finished it, and tells the other side.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed
from bench.commits import Commit
from bench.jobs import BENCH, CraftJob, Job, JobFailed, Member
from bench.sharded_models import DEPTH, REPLICAS, SHARDS, WIDTH, shard_bytes

SCRIPT = "sharded_overhead_worker.py"
SIDES = ("craft", "hsdp")
WORKERS = REPLICAS * SHARDS
WARMUP_PAIRS = 2
START_LIMIT_S = 180.0
MEMORY_STEPS = 12
MEMORY_SAMPLES = 16
"""Few, so that activations are small beside parameters."""

# The names that torch does not export by type.
dist: Any = torch.distributed


class HsdpJob(Job):
    """Four processes of torch's own HSDP; they meet through the benchmark's store."""

    def __init__(self, folder: Path, args: list[str]) -> None:
        super().__init__(folder)
        for rank in range(WORKERS):
            self.start([sys.executable, BENCH / SCRIPT, "--side", "hsdp", "--rank", str(rank), *args], f"{rank}.log")

    def members(self) -> list[Member]:
        return [Member(str(rank), process.pid) for rank, process in enumerate(self._started)]

    def commits(self) -> dict[str, list[Commit]]:
        return {}


class Turns:
    """Lets the sides train in turns, through a store."""

    def __init__(self, limit_s: float) -> None:
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._store.set_timeout(timedelta(seconds=limit_s))
        self.port: int = self._store.port

    def get(self, key: str, jobs: list[Job]) -> str:
        """Wait for a value; a job that ended, or takes too long, is an error."""
        try:
            return str(self._store.get(key).decode())
        except dist.DistStoreError as error:
            logs = "\n".join(job.log_tail() for job in jobs)
            raise JobFailed(f"no {key}: {error}\n{logs}") from None

    def block(self, side: str, number: int, jobs: list[Job]) -> dict[str, float]:
        """Have one side train a block; return the seconds of its slowest worker, and the processor time of all."""
        self._store.set(f"go/{side}/{number}", "")
        found = [self.get(f"done/{side}/{number}/{each + 1}", jobs).split() for each in range(WORKERS)]
        return {side: max(float(each[0]) for each in found), f"{side}_cpu": sum(float(each[1]) for each in found)}

    def peaks(self, side: str, jobs: list[Job]) -> list[float]:
        return [float(self.get(f"peak/{side}/{each + 1}", jobs)) for each in range(WORKERS)]


def run_pair(
    args: argparse.Namespace, folder: Path, pairs: int, samples: int, width: int = WIDTH, steps: int | None = None
) -> dict[str, Any]:
    """Run both sides in turns; return samples, block pairs without the warm-up, and peaks of memory."""
    turns = Turns(START_LIMIT_S + 4 * args.steps_per_block * args.step_ms / 1e3)
    options: dict[str, Any] = {
        "--port": turns.port,
        "--step-ms": args.step_ms,
        "--samples": samples,
        "--blocks": pairs + WARMUP_PAIRS,
        "--steps-per-block": steps or args.steps_per_block,
        "--width": width,
        "--depth": getattr(args, "depth", DEPTH),
        "--device": getattr(args, "device", "cpu"),
    }
    options |= {"--profile": args.profile.resolve()} if args.profile else {}
    script_args = [str(part) for option in options.items() for part in option]
    with HsdpJob(folder / "hsdp", script_args) as hsdp:
        found = int(turns.get("samples", [hsdp]))
        craft_args = ["--side", "craft", *script_args]
        replicas = ["--workers-per-replica", str(SHARDS)]
        with CraftJob(folder / "craft", SCRIPT, craft_args, WORKERS, replicas) as craft:
            jobs: list[Job] = [craft, hsdp]
            numbers = range(pairs + WARMUP_PAIRS)
            blocks = [turns.block("craft", each, jobs) | turns.block("hsdp", each, jobs) for each in numbers]
            peaks = {side: turns.peaks(side, jobs) for side in SIDES}
            craft.wait(START_LIMIT_S)
        hsdp.wait(START_LIMIT_S)
    return {"samples": found, "blocks": blocks[WARMUP_PAIRS:], "peaks": peaks}


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return block pairs and peaks of memory; jobs that failed must not end the benchmark."""
    blocks: list[dict[str, float]] = []
    memory: list[dict[str, Any]] = []
    failed: list[dict[str, str]] = []
    samples = args.samples

    def attempt(what: str, folder: Path, **options: Any) -> dict[str, Any] | None:
        try:
            return run_pair(args, folder, **options)
        except (JobFailed, subprocess.SubprocessError) as error:
            failed.append({"system": "craft", "error": f"{what}: {error}"})
            print(f"{what}: FAILED, {error}", flush=True)
            return None

    for turn in range(args.rounds):
        pairs = args.pairs * (turn + 1) // args.rounds - args.pairs * turn // args.rounds
        if pairs and (found := attempt(f"round {turn + 1}", folder / f"step-{turn}", pairs=pairs, samples=samples)):
            samples = found["samples"]
            blocks += found["blocks"]
            craft_s, hsdp_s = (sum(each[side] for each in found["blocks"]) for side in SIDES)
            step_ms = 1e3 * hsdp_s / (pairs * args.steps_per_block)
            cpu = sum(each["craft_cpu"] for each in found["blocks"]) / sum(each["hsdp_cpu"] for each in found["blocks"])
            figures = f"HSDP step {step_ms:.1f} ms, {pairs} pairs, ratio of means {craft_s / hsdp_s:.3f}, of CPU time {cpu:.3f}"
            print(f"round {turn + 1} ({samples} samples per worker): {figures}", flush=True)
    for turn in range(args.memory_rounds):
        for width in args.widths:
            place = folder / f"memory-{turn}-{width}"
            options = {"pairs": 0, "samples": MEMORY_SAMPLES, "width": width, "steps": MEMORY_STEPS}
            if found := attempt(f"memory, width {width}", place, **options):
                memory.append({"width": width, "shard_bytes": shard_bytes(width), **found["peaks"]})
                shown = ", ".join(f"{side} {max(found['peaks'][side]) / 1e6:.0f} MB" for side in SIDES)
                print(f"memory, width {width}: {shown}", flush=True)
    return {"blocks": blocks, "samples": samples, "memory": memory, "failed": failed}
