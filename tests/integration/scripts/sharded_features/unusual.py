"""What torch itself does not have for FSDP2 on a CPU: ``unusual.py offload|copy|adafactor``."""

import copy

import torch
from setting import Tower, join, loss_of, parser, text
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

parser.add_argument("kind")
args = parser.parse_args()
job = join()
mesh = job.mesh(shard=job.replica_size)
model = Tower()
fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy() if args.kind == "offload" else OffloadPolicy())
if args.kind == "copy":
    # As torch.optim.swa_utils.AveragedModel does.
    copy.deepcopy(model)
model = job.replicate(model)
make: type[torch.optim.Optimizer] = torch.optim.Adafactor if args.kind == "adafactor" else torch.optim.AdamW
optimizer = make(model.parameters())  # type: ignore[call-arg]
job.register(optimizer=optimizer)
for step in job.steps(text(), global_batch=32, microbatches=4, steps=args.steps, seed=0):
    optimizer.zero_grad()
    for (tokens,) in step:
        loss_of(model, tokens).backward()
    optimizer.step()
