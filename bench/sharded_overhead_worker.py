"""One worker of ``bench/sharded.py overhead``: trains blocks of steps with CRAFT's replicas, or with torch's own HSDP.

The two sides are two sets of four processes. The benchmark gives the word for each block through a store: one side trains while
the other one waits for its turn, so that the sides alternate as blocks of one process would.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.models import Batch, backward, build_optimizer, endless_batches, fit_samples, update
from bench.sharded_models import DEPTH, REPLICAS, SHARDS, WIDTH, Taught, build_sharded, mean_by_sum

CALIBRATION_STEPS = 20
WORKERS = REPLICAS * SHARDS

# The names that torch does not export by type.
dist: Any = torch.distributed


def hsdp_side(dataset: Taught, samples: int, width: int, depth: int, device: torch.device) -> Iterator[None]:
    """Train with torch's HSDP: a mesh of replicas and shards over the default (Gloo or NCCL) group."""
    rank = dist.get_rank()
    mesh = init_device_mesh(device.type, (REPLICAS, SHARDS), mesh_dim_names=("replicate", "shard"))
    model = build_sharded(mesh, width, depth)
    if device.type == "cpu":
        mean_by_sum(model)
    optimizer = build_optimizer(model)
    batches = endless_batches(dataset, samples, rank, WORKERS)
    while True:
        optimizer.zero_grad()
        backward(model, on(device, next(batches)))
        update(model, optimizer)
        yield


def craft_side(dataset: Taught, samples: int, steps: int, width: int, depth: int) -> Iterator[None]:
    """Train with CRAFT; one microbatch per replica, of which a worker has as many samples as one of HSDP."""
    import craft

    job = craft.join()
    model = job.replicate(build_sharded(job.mesh(shard=SHARDS), width, depth))
    optimizer = build_optimizer(model)
    job.register(optimizer=optimizer)
    for step in job.steps(dataset, global_batch=samples * WORKERS, microbatches=REPLICAS, steps=steps, seed=0):
        optimizer.zero_grad()
        for batch in step:
            backward(model, on(job.device, batch))
        update(model, optimizer)
        yield


def on(device: torch.device, batch: Batch) -> Batch:
    features, labels = batch
    return features.to(device), labels.to(device)


def timed(side: Iterator[None], steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        next(side)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def meet(store: Any, rank: int, device: torch.device) -> None:
    """Initialise the default group of HSDP's workers."""
    members = {"store": dist.PrefixStore("hsdp", store), "rank": rank, "world_size": WORKERS}
    if device.type == "cpu":
        dist.init_process_group("gloo", **members)
        return
    # As CRAFT does it: NCCL refuses two ranks on one device of one host.
    os.environ.setdefault("NCCL_HOSTID", f"hsdp-{rank}")
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, **members)


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that this process had: of the device, if it trains on one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def calibrate(target_s: float, dataset: Taught, width: int, depth: int, device: torch.device) -> int:
    """Return the samples per worker that make a step of HSDP take ``target_s``; the same answer on every worker."""

    def measure(samples: int) -> float:
        side = hsdp_side(dataset, samples, width, depth, device)
        dist.barrier()
        slowest = torch.tensor(statistics.median([timed(side, 1) for _ in range(CALIBRATION_STEPS)][5:]))
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    return fit_samples(target_s, measure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=["craft", "hsdp"], required=True)
    parser.add_argument("--rank", type=int, default=0, help="of HSDP's workers")
    parser.add_argument("--port", type=int, required=True, help="where the benchmark's store listens")
    parser.add_argument("--step-ms", type=float, required=True, help="HSDP's step to calibrate for")
    parser.add_argument("--samples", type=int, default=0, help="samples per worker, instead of a calibration")
    parser.add_argument("--blocks", type=int, required=True, help="of one side")
    parser.add_argument("--steps-per-block", type=int, required=True)
    parser.add_argument("--width", type=int, default=WIDTH, help="of the model")
    parser.add_argument("--depth", type=int, default=DEPTH, help="layers of the model")
    parser.add_argument("--device", type=torch.device, default="cpu", help="cpu, or cuda:0 for all workers")
    parser.add_argument("--profile", type=Path, help="folder for a profile of each worker's steps")
    args = parser.parse_args()

    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", args.port, is_master=False)
    dataset = Taught()
    if args.side == "hsdp":
        meet(store, args.rank, args.device)
        samples = args.samples or calibrate(args.step_ms / 1e3, dataset, args.width, args.depth, args.device)
        side = hsdp_side(dataset, samples, args.width, args.depth, args.device)
        store.set("samples", str(samples))
    else:
        samples = int(store.get("samples"))
        side = craft_side(dataset, samples, args.blocks * args.steps_per_block, args.width, args.depth)
    profiler = cProfile.Profile() if args.profile else None
    for block in range(args.blocks):
        store.get(f"go/{args.side}/{block}")
        if profiler and block:
            profiler.enable()
        if block == 1 and args.device.type == "cuda":
            # What the first steps need, in which CRAFT compares microbatches, is not there later.
            torch.cuda.reset_peak_memory_stats()
        cpu_s = time.process_time()
        seconds = timed(side, args.steps_per_block)
        cpu_s = time.process_time() - cpu_s
        if profiler:
            profiler.disable()
        number = store.add(f"number/{args.side}/{block}", 1)
        store.set(f"done/{args.side}/{block}/{number}", f"{seconds} {cpu_s}")
    if profiler:
        profiler.dump_stats(args.profile / f"{args.side}.{os.getpid()}.prof")
    store.set(f"peak/{args.side}/{store.add(f'peaks/{args.side}', 1)}", str(peak_bytes(args.device)))
    if args.side == "craft":
        next(side, None)  # lets CRAFT's loop end as it would in a script
    else:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
