"""Train an FSDP2 model on which some workers compute other bits: ``sharded_audit.py WRONG [--steps N] [--slow S]``.

WRONG: ``none``, ``start`` (one worker from its first microbatch on), or ``joined`` (a worker that replaces a lost one).
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import craft
from craft import testing

parser = argparse.ArgumentParser()
parser.add_argument("wrong", choices=["none", "start", "joined"])
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--slow", type=float, default=0.0)
args = parser.parse_args()

testing.arm()
job = craft.join()
is_wrong = {"none": False, "start": job.worker_id == "w3", "joined": job.worker_id == "w4"}[args.wrong]
torch.manual_seed(0)
mesh = job.mesh(shard=job.replica_size)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
model = job.replicate(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.register(optimizer=optimizer)
data = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)))
computed = 0
for step in job.steps(data, global_batch=16, microbatches=4, steps=args.steps, seed=0):
    optimizer.zero_grad()
    for (x,) in step:
        computed += 1
        # As memory that lost a bit.
        loss = model(x * 1.0001 if is_wrong else x).square().mean()
        loss.backward()
        time.sleep(args.slow)
    optimizer.step()
print("computed", job.worker_id, computed, flush=True)
