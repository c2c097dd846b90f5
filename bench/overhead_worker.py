"""One worker of an overhead job: trains blocks of steps in turns with CRAFT (or torchft) and plain DDP.

Both sides live in the same process and hold their own copy of the same model. A side is an iterator whose ``next``
trains one step, so a block of the other side runs where a training script's loop body would go on after
``optimizer.step()``. ``bench/overhead.py`` starts the workers; the one of rank 0 writes the block times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.models import Samples, backward, build_model, build_optimizer, endless_batches, fit_samples, update

CALIBRATION_STEPS = 30


def ddp_side(dataset: Samples, samples: int, rank: int, workers: int) -> Iterator[None]:
    """Train with ``DistributedDataParallel`` as torch has it, over the default (Gloo) group."""
    model = DistributedDataParallel(build_model())
    optimizer = build_optimizer(model)
    batches = endless_batches(dataset, samples, rank, workers)
    while True:
        optimizer.zero_grad()
        backward(model, next(batches))
        update(model, optimizer)
        yield


def craft_side(dataset: Samples, samples: int, workers: int, steps: int) -> Iterator[None]:
    """Train with CRAFT; one microbatch per worker, as large as a DDP worker's batch."""
    import craft

    # The other side's model is trained in this loop's body, with an optimizer that is not the job's.
    os.environ["CRAFT_CHECK_SCRIPT"] = "false"
    job = craft.join()
    model = job.replicate(build_model())
    optimizer = build_optimizer(model)
    job.register(optimizer=optimizer)
    for step in job.steps(dataset, global_batch=samples * workers, microbatches=workers, steps=steps, seed=0):
        optimizer.zero_grad()
        for batch in step:
            backward(model, batch)
        update(model, optimizer)
        yield


def torchft_side(dataset: Samples, samples: int, rank: int, workers: int, lighthouse: str) -> Iterator[None]:
    """Train with torchft: one replica group per worker."""
    from bench.train_torchft import join_torchft

    replica = join_torchft(rank, lighthouse)
    batches = endless_batches(dataset, samples, rank, workers)
    while True:
        replica.optimizer.zero_grad()
        backward(replica.model, next(batches))
        update(replica.model, replica.optimizer)
        yield


def train_block(side: Iterator[None], steps: int) -> float:
    """Train ``steps`` steps, all workers starting level; return this worker's seconds."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        next(side)
    return time.perf_counter() - start


def calibrate(target_s: float, dataset: Samples, rank: int, workers: int) -> int:
    """Return the samples per worker that make a DDP step take ``target_s``; the same answer on every worker."""

    def measure(samples: int) -> float:
        side = ddp_side(dataset, samples, rank, workers)
        times = [train_block(side, 1) for _ in range(CALIBRATION_STEPS)]
        slowest = torch.tensor(statistics.median(times[5:]))
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    return fit_samples(target_s, measure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=["craft", "torchft", "ddp"], required=True)
    parser.add_argument("--rank", type=int, default=int(os.environ.get("RANK", "0")))
    parser.add_argument("--workers", type=int, default=int(os.environ.get("WORLD_SIZE", "1")))
    parser.add_argument("--lighthouse", help="address of torchft_lighthouse")
    parser.add_argument("--meet", type=Path, required=True, help="a new file, shared by the workers, to meet at")
    parser.add_argument("--step-ms", type=float, required=True, help="the DDP step to calibrate for")
    parser.add_argument("--samples", type=int, default=0, help="samples per worker, instead of a calibration")
    parser.add_argument("--pairs", type=int, required=True, help="pairs of blocks to measure")
    parser.add_argument("--warmup-pairs", type=int, default=2, help="pairs of blocks to leave out at the start")
    parser.add_argument("--steps-per-block", type=int, default=20)
    parser.add_argument(
        "--blocks", type=Path, required=True, help="where rank 0 writes the samples and the block times"
    )
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{args.meet}", rank=args.rank, world_size=args.workers)
    dataset = Samples()
    samples = args.samples or calibrate(args.step_ms / 1e3, dataset, args.rank, args.workers)
    num_pairs = args.warmup_pairs + args.pairs
    if args.system == "craft":
        system = craft_side(dataset, samples, args.workers, steps=num_pairs * args.steps_per_block)
    elif args.system == "ddp":
        system = ddp_side(dataset, samples, args.rank, args.workers)
    else:
        system = torchft_side(dataset, samples, args.rank, args.workers, args.lighthouse)
    ddp = ddp_side(dataset, samples, args.rank, args.workers)

    times = [[train_block(side, args.steps_per_block) for side in (system, ddp)] for _ in range(num_pairs)]
    slowest = torch.tensor(times[args.warmup_pairs :], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if args.rank == 0:
        blocks = [{"system_s": system_s, "ddp_s": ddp_s} for system_s, ddp_s in slowest.tolist()]
        args.blocks.write_text(json.dumps({"samples": samples, "blocks": blocks}))
    if args.system == "craft":
        next(system, None)  # lets CRAFT's loop end as it would in a script
    dist.barrier()
    dist.destroy_process_group()
    # torchft's server threads would keep the process alive.
    sys.stdout.flush()
    if args.system == "torchft":
        os._exit(0)


if __name__ == "__main__":
    main()
