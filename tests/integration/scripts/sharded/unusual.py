"""Uses of FSDP2 that are refused, by CRAFT or by torch: ``unusual.py KIND``."""

import copy

import torch
from setting import Tower, join, loss_of, parser, text
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard

parser.add_argument("kind")
args = parser.parse_args()
job = join()
mesh = job.mesh(shard=job.replica_size)
model = Tower()
if args.kind == "hsdp":
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "shard"))
if args.kind == "fsdp1":
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
else:
    fully_shard(model, mesh=mesh, **({"offload_policy": CPUOffloadPolicy()} if args.kind == "offload" else {}))
if args.kind == "copy":
    copy.deepcopy(model)
if args.kind == "whole":
    model.compile(backend="aot_eager")
model = job.replicate(model)
kinds = {"adafactor": torch.optim.Adafactor, "lbfgs": torch.optim.LBFGS}
optimizer = kinds.get(args.kind, torch.optim.AdamW)(model.parameters(), lr=1e-3)
job.register(optimizer=optimizer)
for step in job.steps(text(), global_batch=32, microbatches=4, steps=args.steps, seed=0):
    optimizer.zero_grad()
    for number, (tokens,) in enumerate(step):
        if args.kind == "unsynced":
            model.set_requires_gradient_sync(number == 1)
        loss_of(model, tokens).backward()
    optimizer.step()
