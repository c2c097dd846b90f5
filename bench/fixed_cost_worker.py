"""One worker of ``bench/fixed_cost.py``: blocks of very short steps, in turns with CRAFT and with plain DDP."""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.models import Samples, backward, build_model, build_optimizer, endless_batches, update
from bench.overhead_worker import train_block

WIDTH, DEPTH = 128, 2
WARM_UP_PAIRS = 2


def ddp_side(dataset: Samples, samples: int, rank: int, workers: int) -> Iterator[None]:
    model = DistributedDataParallel(build_model(width=WIDTH, depth=DEPTH))
    optimizer = build_optimizer(model)
    batches = endless_batches(dataset, samples, rank, workers)
    while True:
        optimizer.zero_grad()
        backward(model, next(batches))
        update(model, optimizer)
        yield


def craft_side(dataset: Samples, samples: int, workers: int, steps: int) -> Iterator[None]:
    import craft

    # The other side's model is trained in this loop's body, with an optimizer that is not the job's.
    os.environ["CRAFT_CHECK_SCRIPT"] = "false"
    job = craft.join()
    model = job.replicate(build_model(width=WIDTH, depth=DEPTH))
    optimizer = build_optimizer(model)
    job.register(optimizer=optimizer)
    for step in job.steps(dataset, global_batch=samples * workers, microbatches=workers, steps=steps, seed=0):
        optimizer.zero_grad()
        for batch in step:
            backward(model, batch)
        update(model, optimizer)
        yield


def by_file(profile: cProfile.Profile, steps: int) -> list[dict[str, Any]]:
    """Return own time and calls per step of each file, most time first."""
    time_s: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    stats: dict[tuple[str, int, str], Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for (file, _, name), (_, count, own_s, _, _) in stats.items():
        known = file.partition("/src/")[2] or file.partition("site-packages/")[2] or f"{file}:{name}"
        time_s[known] += own_s
        calls[known] += count
    rows = [{"file": file, "us": time_s[file] / steps * 1e6, "calls": calls[file] / steps} for file in time_s]
    return sorted(rows, key=lambda row: -float(str(row["us"])))[:40]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--steps-per-block", type=int, required=True)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--profiled-steps", type=int, required=True)
    parser.add_argument("--meet", type=Path, required=True)
    parser.add_argument("--blocks", type=Path, required=True)
    args = parser.parse_args()
    rank, workers = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{args.meet}", rank=rank, world_size=workers)
    dataset, num_pairs = Samples(), WARM_UP_PAIRS + args.pairs
    profiled = args.profiled_steps if args.profile else 0
    craft = craft_side(dataset, args.samples, workers, steps=num_pairs * args.steps_per_block + profiled)
    ddp = ddp_side(dataset, args.samples, rank, workers)
    times = [[train_block(side, args.steps_per_block) for side in (craft, ddp)] for _ in range(num_pairs)]
    slowest = torch.tensor(times[WARM_UP_PAIRS:], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    found: dict[str, Any] = {"blocks": [{"craft_s": one, "ddp_s": other} for one, other in slowest.tolist()]}
    if profiled:
        profile = cProfile.Profile()
        if rank == 0:
            profile.enable()
        train_block(craft, profiled)
        if rank == 0:
            profile.disable()
            found["profile"] = by_file(profile, profiled)
    if rank == 0:
        args.blocks.write_text(json.dumps(found))
    next(craft, None)  # lets CRAFT's loop end as it would in a script
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
