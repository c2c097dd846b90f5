"""One worker of an overhead job on a GPU: blocks of steps in turns with CRAFT and with plain DDP over NCCL, same processes.

``bench/gpu.py`` starts the workers; rank 0 writes block times and what each side holds in device memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

import craft

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "llama"))

from model import SIZES, Llama, Text, loss_of

dist: Any = torch.distributed


def build(size: str, length: int, device: torch.device) -> tuple[Llama, torch.optim.Optimizer]:
    torch.manual_seed(0)
    with device:
        model = Llama(SIZES[size], length).to(torch.bfloat16)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def ddp_side(args: argparse.Namespace, data: Text, device: torch.device, rank: int, size: int) -> Iterator[None]:
    model, optimizer = build(args.size, args.length, device)
    wrapped = DistributedDataParallel(model, device_ids=[device.index])
    place = rank * args.samples
    while True:
        optimizer.zero_grad()
        text = torch.stack([data[(place + each) % len(data)] for each in range(args.samples)])
        loss = loss_of(wrapped, text.to(device, non_blocking=True))
        loss.backward()
        optimizer.step()
        # A script looks at its loss; CRAFT's side does so, too.
        loss.item()
        place += size * args.samples
        yield


def craft_side(args: argparse.Namespace, data: Text, job: craft.Job, size: int, steps: int) -> Iterator[None]:
    model, optimizer = build(args.size, args.length, job.device)
    model = job.replicate(model)
    job.register(optimizer=optimizer)
    for step in job.steps(data, global_batch=size * args.samples, microbatches=size, steps=steps, seed=0):
        optimizer.zero_grad()
        for text in step:
            loss = loss_of(model, text.to(job.device, non_blocking=True))
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
        yield


def warm_up(args: argparse.Namespace, data: Text, device: torch.device) -> None:
    """Train one step alone: what the libraries keep of the device from then on is neither side's."""
    model, optimizer = build(args.size, args.length, device)
    loss_of(model, torch.stack([data[0]] * args.samples).to(device)).backward()
    optimizer.step()


def held(side: Iterator[None]) -> tuple[int, int]:
    """Train three steps; return what the side holds of device memory between steps, and at most within one."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        next(side)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    next(side)
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before


def block(side: Iterator[None], steps: int) -> float:
    dist.barrier()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        next(side)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--steps-per-block", type=int, required=True)
    parser.add_argument("--meet", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # As CRAFT does it: NCCL refuses two ranks on one device of one host.
    os.environ.setdefault("NCCL_HOSTID", f"bench-{rank}")

    # The other side's model is trained in this loop's body, with an optimizer that is not the job's.
    os.environ["CRAFT_CHECK_SCRIPT"] = "false"
    job = craft.join()
    dist.init_process_group("nccl", init_method=f"file://{args.meet}", rank=rank, world_size=size, device_id=job.device)
    data = Text(600, args.length, SIZES[args.size].tokens)
    steps = 3 + args.pairs * args.steps_per_block
    ours = craft_side(args, data, job, size, steps)
    plain = ddp_side(args, data, job.device, rank, size)
    warm_up(args, data, job.device)
    memory = {"craft": held(ours), "ddp": held(plain)}
    times = [[block(side, args.steps_per_block) for side in (ours, plain)] for _ in range(args.pairs)]
    slowest = torch.tensor(times, dtype=torch.float64, device=job.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank == 0:
        with torch.device("meta"):
            params = sum(param.numel() for param in Llama(SIZES[args.size], args.length).parameters())
        args.out.write_text(json.dumps({"blocks": slowest.tolist(), "memory": memory, "params": params}))
    next(ours, None)  # lets CRAFT's loop end as it would in a script
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
