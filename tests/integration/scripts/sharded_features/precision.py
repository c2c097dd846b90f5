"""FSDP2 in bfloat16 with activation checkpointing, a fused optimizer, and gradients accumulated inside a microbatch."""

import torch
from setting import Tower, join, loss_of, parser, pause, text
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from craft import testing

args = parser.parse_args()


class Recomputed(nn.Module):
    """Keeps no activations of the module inside: backward computes them again, with the same dropout."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.inside, x, use_reentrant=False)
        return out


job = join()
mesh = job.mesh(shard=job.replica_size)
model = Tower()
model.blocks = nn.ModuleList(map(Recomputed, model.blocks))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.blocks:
    fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
model = job.replicate(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
job.register(optimizer=optimizer, scheduler=scheduler)
for step in job.steps(text(), global_batch=32, microbatches=4, steps=args.steps, seed=0):
    optimizer.zero_grad()
    for (tokens,) in step:
        for part in tokens.chunk(2):
            (loss_of(model, part) / 2).backward()
        pause(args.slow)
    testing.reach("before_clip", step.number)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False, error_if_nonfinite=True)
    testing.reach("update", step.number)
    optimizer.step()
    scheduler.step()
