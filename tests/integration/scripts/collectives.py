"""A job whose script has a group of its own: at step --at one worker does not fit in with the others, as --kind says."""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.utils.data import TensorDataset

import craft

parser = argparse.ArgumentParser()
parser.add_argument("--kind", choices=["order", "size", "missing"], required=True)
parser.add_argument("--at", type=int, default=8)
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()
dist: Any = torch.distributed

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
job = craft.join()
model = job.replicate(model)
job.register(optimizer=optimizer)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.FileStore(str(Path(os.environ["CRAFT_RUN_DIR"]) / "store"), size)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def odd_one_out() -> None:
    """The last rank does something else than the others."""
    odd = rank == size - 1
    if options.kind == "order" and odd:
        dist.broadcast(torch.ones(1), src=0)
    elif options.kind == "size" and odd:
        dist.all_reduce(torch.ones(2))
    elif not (options.kind == "missing" and odd):
        dist.all_reduce(torch.ones(1))


for step in job.steps(TensorDataset(torch.ones(64, 4)), global_batch=8, microbatches=4, steps=options.steps, seed=0):
    optimizer.zero_grad()
    for (x,) in step:
        model(x).mean().backward()
    optimizer.step()
    if step.number < options.at:
        dist.all_reduce(torch.ones(3))
    elif step.number == options.at:
        odd_one_out()
