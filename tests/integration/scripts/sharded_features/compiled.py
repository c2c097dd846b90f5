"""FSDP2 blocks that ``torch.compile`` compiles one by one, under autocast."""

import torch
from setting import Tower, join, loss_of, parser, pause, text
from torch import nn
from torch.distributed.fsdp import fully_shard

from craft import testing

parser.add_argument("--backend", default="inductor")
args = parser.parse_args()
job = join()
mesh = job.mesh(shard=job.replica_size)
model = Tower()
for block in model.blocks:
    block.compile(backend=args.backend)
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
model = job.replicate(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
job.register(optimizer=optimizer)
for step in job.steps(text(), global_batch=32, microbatches=4, steps=args.steps, seed=0):
    optimizer.zero_grad()
    for (tokens,) in step:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, tokens)
        loss.backward()
        pause(args.slow)
    testing.reach("before_clip", step.number)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    testing.reach("update", step.number)
    optimizer.step()
