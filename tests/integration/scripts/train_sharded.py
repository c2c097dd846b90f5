"""Train a small model that is spread over the workers of a replica: ``train_sharded.py KIND [--steps N] [--slow S]``.

``--slow-until FILE`` sleeps in every microbatch until the file exists; ``--slow-worker ID`` makes it sleep in that worker only.

KIND: ``fsdp`` (FSDP2), ``tp`` (tensor parallel), or ``both`` (FSDP2 over one half of the mesh, tensor parallel over the other);
``plain`` is the same model on one worker.
"""

from __future__ import annotations

import argparse
import faulthandler
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import TensorDataset

import craft
from craft import testing

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        return out


parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=["fsdp", "tp", "both", "plain"])
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--slow", type=float, default=0.0)
parser.add_argument("--slow-until", type=Path)
parser.add_argument("--slow-worker")
parser.add_argument("--nan-at", type=int, help="the loss of this step is no number, the first time")
parser.add_argument("--tag-at", type=int, help="after this step the script asks for a checkpoint")
parser.add_argument("--classes", type=int, default=10, help="another number is another model")
args = parser.parse_args()
faulthandler.register(signal.SIGUSR1, all_threads=True)

# A test whose job hangs asks for the stacks of all threads.
faulthandler.register(signal.SIGUSR1, all_threads=True)
testing.arm()
job = craft.join()
torch.manual_seed(0)
size = job.replica_size
if args.kind != "plain":
    mesh = job.mesh(**{"fsdp": {"shard": size}, "tp": {"tp": size}, "both": {"shard": size // 2, "tp": 2}}[args.kind])
model = nn.Sequential(*[Block() for _ in range(3)], nn.Linear(WIDTH, args.classes)).to(job.device)
if args.kind in ("tp", "both"):
    for block in list(model.children())[:3]:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
if args.kind in ("fsdp", "both"):
    for block in list(model.children())[:3]:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
model = job.replicate(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=args.kind == "fsdp")
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
job.register(optimizer=optimizer, scheduler=scheduler)
generator = torch.Generator().manual_seed(1)
samples = torch.randn(256, WIDTH, generator=generator)
data = TensorDataset(samples, torch.randint(0, 10, (256,), generator=generator))
for step in job.steps(data, global_batch=32, microbatches=4, steps=args.steps, seed=0):
    optimizer.zero_grad()
    for x, y in step:
        loss = F.cross_entropy(model(x.to(job.device)), y.to(job.device))
        if step.number == args.nan_at and job.branch == 0:
            loss = loss * float("nan")
        testing.reach("forward", step.number)
        loss.backward()
        testing.reach("backward", step.number)
        step.log(loss=loss)
        if args.slow_worker in (None, job.worker_id) and not (args.slow_until and args.slow_until.exists()):
            time.sleep(args.slow)
    testing.reach("before_clip", step.number)
    if args.kind == "fsdp":
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    testing.reach("after_clip", step.number)
    optimizer.step()
    testing.reach("after_update", step.number)
    scheduler.step()
    if step.number == args.tag_at:
        job.checkpoint(tag="best")
