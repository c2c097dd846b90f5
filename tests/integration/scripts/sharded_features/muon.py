"""FSDP2 with Muon for matrices, whose update needs whole matrices, and AdamW for the rest."""

import torch
from setting import Tower, join, loss_of, parser, pause, text
from torch import nn
from torch.distributed.fsdp import fully_shard

from craft import testing

args = parser.parse_args()
job = join()
mesh = job.mesh(shard=job.replica_size)
model = Tower()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
model = job.replicate(model)
matrices = [param for param in model.blocks.parameters() if param.dim() == 2]
rest = [param for param in model.parameters() if all(param is not each for each in matrices)]
optimizers = {"muon": torch.optim.Muon(matrices, lr=1e-2), "adamw": torch.optim.AdamW(rest, lr=1e-3)}
job.register(**optimizers)
for step in job.steps(text(), global_batch=32, microbatches=4, steps=args.steps, seed=0):
    model.zero_grad()
    for (tokens,) in step:
        loss_of(model, tokens).backward()
        pause(args.slow)
    testing.reach("before_clip", step.number)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    testing.reach("update", step.number)
    for optimizer in optimizers.values():
        optimizer.step()
