"""Sizes that do not divide, parts without a row, modules sharded together, prefetch, a gradient scaler."""

import torch
from setting import Tower, join, loss_of, parser, pause, text
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from craft import testing

parser.add_argument("--reshard", type=int, default=0, help="reshard_after_forward to so many workers")
args = parser.parse_args()
job = join()
mesh = job.mesh(shard=job.replica_size)
model = Tower(blocks=3, width=27, hidden=41)
model.register_parameter("scale", nn.Parameter(torch.ones(1)))
reshard = args.reshard or True
for block in model.blocks:
    fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
fully_shard([model.norm, model.head], mesh=mesh)
fully_shard(model, mesh=mesh)
first, second, third = (each for each in model.blocks if isinstance(each, FSDPModule))
first.set_modules_to_forward_prefetch([second, third])
third.set_modules_to_backward_prefetch([second, first])
model = job.replicate(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=True, foreach=True)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
job.register(optimizer=optimizer, scaler=scaler)
for step in job.steps(text(), global_batch=32, microbatches=4, steps=args.steps, seed=0):
    optimizer.zero_grad()
    for (tokens,) in step:
        scaler.scale(loss_of(model, tokens) * model.get_parameter("scale").sum()).backward()
        pause(args.slow)
    testing.reach("before_clip", step.number)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    testing.reach("update", step.number)
    scaler.step(optimizer)
    scaler.update()
