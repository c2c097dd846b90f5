"""Jobs whose workers do not make the same calls between the steps: mistakes that scripts really have."""

import argparse
import faulthandler
import signal

import torch
from torch.utils.data import Subset, TensorDataset

import craft

parser = argparse.ArgumentParser()
parser.add_argument("--kind", required=True)
parser.add_argument("--at", type=int, default=0, help="the step after which it happens")
options = parser.parse_args()
faulthandler.register(signal.SIGUSR1, all_threads=True)

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(64, 8)
data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))

job = craft.join()
model = job.replicate(model)
job.register(optimizer=optimizer)
for step in job.steps(data, global_batch=16, microbatches=4, steps=8, seed=3):
    optimizer.zero_grad()
    for x, y in step:
        (model(x) - y).pow(2).mean().backward()
    optimizer.step()
    job.barrier()
    if step.number != options.at:
        continue
    if options.kind == "barrier" and job.is_leader:
        job.barrier()
    if options.kind == "all_but_one" and not job.is_leader:
        job.all_reduce(torch.ones(1))
    if options.kind == "checkpoint" and job.is_leader:
        job.checkpoint(tag="best")
    if options.kind == "another":
        if job.is_leader:
            job.broadcast_object({"step": step.number})
        else:
            job.barrier()
    if options.kind == "break" and not job.is_leader:
        break
    if options.kind == "split":
        part = Subset(data, range(job.rank, len(data), job.world_size))
        job.evaluate(part, lambda batch: {"mean": batch[0].mean()}, batch_size=4)
