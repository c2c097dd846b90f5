"""Train an FSDP2 model and make calls between the steps: ``sharded_calls.py [--steps N] [--slow S] [--no-calls]``.

The results are part of the state, so that a run which lost a worker shows whether they are the same.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import craft
from craft import testing

WIDTH = 16

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--slow", type=float, default=0.0)
parser.add_argument("--no-calls", action="store_true")
args = parser.parse_args()

testing.arm()
job = craft.join()
torch.manual_seed(0)
mesh = job.mesh(shard=job.replica_size)
model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)) for _ in range(3)], nn.Linear(WIDTH, 4))
for block in list(model.children())[:3]:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
model = job.replicate(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
results: dict[str, Any] = {}
job.register(optimizer=optimizer)
job.register_state(save=lambda: dict(results), load=results.update)
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(128, WIDTH, generator=generator), torch.randint(0, 4, (128,), generator=generator))
# The last batch has 5 samples, which two workers cannot divide.
held_out = TensorDataset(torch.randn(53, WIDTH, generator=generator), torch.randint(0, 4, (53,), generator=generator))


def score(batch: Any) -> dict[str, torch.Tensor]:
    x, y = batch
    time.sleep(args.slow)
    testing.reach("score", job.step)
    out = model(x)
    return {"loss": F.cross_entropy(out, y), "right": (out.argmax(1) == y).float().mean()}


for step in job.steps(data, global_batch=16, microbatches=4, steps=args.steps, seed=0):
    optimizer.zero_grad()
    for x, y in step:
        lane = step.carry(seen=torch.zeros(()))
        lane.seen = lane.seen + x.mean()
        loss = F.cross_entropy(model(x), y) + 0.0 * lane.seen
        loss.backward()
        step.log(loss=loss)
        time.sleep(args.slow)
    if step.number % 3 == 2 and not args.no_calls:
        model.eval()
        results["before"] = job.evaluate(held_out, score, batch_size=8)
        model.train()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    if step.number % 3 == 1 and not args.no_calls:
        model.eval()
        with torch.no_grad():
            results["by hand"] = float(model(data[:8][0]).sum())
        results["evaluated"] = job.evaluate(held_out, score, batch_size=8)
        model.train()
        ones = job.all_reduce(torch.ones(1))
        results["sum"] = float(ones) / job.world_size
        results["told"] = job.broadcast_object({"step": step.number})
        results["once"] = job.once("count", lambda: len(data))
        job.barrier()
        # More collectives of the replica in the same update.
        results["norm"] = float(nn.utils.get_total_norm(model.parameters()).full_tensor())  # type: ignore[attr-defined]
    results["loss"] = step.metrics["loss"]
if job.is_leader:
    print("results", results, flush=True)
