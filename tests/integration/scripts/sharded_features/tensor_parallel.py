"""Tensor and sequence parallel: a rowwise embedding, dropout of sharded activations, a loss of sharded logits."""

import torch
import torch.nn.functional as F
from setting import Tower, join, parser, pause, text
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from craft import testing

args = parser.parse_args()
job = join()
mesh = job.mesh(tp=job.replica_size)
model = Tower()
for block in model.blocks:
    parallelize_module(
        block,
        mesh,
        {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
            "drop": SequenceParallel(use_local_output=True),
        },
    )
parallelize_module(
    model,
    mesh,
    {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    },
)
model = job.replicate(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
job.register(optimizer=optimizer)
for step in job.steps(text(), global_batch=32, microbatches=4, steps=args.steps, seed=0):
    optimizer.zero_grad()
    for (tokens,) in step:
        with loss_parallel():
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        pause(args.slow)
    testing.reach("before_clip", step.number)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    testing.reach("update", step.number)
    optimizer.step()
