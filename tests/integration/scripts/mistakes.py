"""A job whose script makes one mistake, as --kind says; without one it trains as it should."""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import craft
from craft import testing

parser = argparse.ArgumentParser()
parser.add_argument("--kind", default="none")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--slow-until", type=Path, help="every microbatch takes longer until this file is there")
options = parser.parse_args()
testing.arm()

torch.manual_seed(0)
x = torch.randn(400, 16)
data = TensorDataset(x, (x.sum(1) > 0).long())
model = torch.nn.Sequential(
    torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 2)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(5)
job = craft.join()
model = job.replicate(model)
if options.kind != "unregistered":
    job.register(optimizer=optimizer)


def stream(microbatch: int, num_microbatches: int, start_step: int) -> Iterator[Any]:
    """Does not begin at ``start_step``."""
    own = torch.utils.data.Subset(data, range(microbatch, len(data), num_microbatches))
    while True:
        yield from DataLoader(own, batch_size=4)


source: Any = stream if options.kind == "stream" else data
if options.kind == "sampler":
    source = DataLoader(data, batch_size=25, sampler=DistributedSampler(data, num_replicas=2, rank=max(0, job.rank)))
batch = None if options.kind in ("stream", "sampler") else 24
counter = 0
for step in job.steps(source, global_batch=batch, microbatches=6, steps=options.steps):
    optimizer.zero_grad()
    for inputs, labels in step:
        if options.slow_until is not None and not options.slow_until.exists():
            time.sleep(0.01)
        if options.kind == "generator":
            inputs = inputs + 0.1 * torch.randn(inputs.shape, generator=generator)
        loss = F.cross_entropy(model(inputs), labels, reduction="sum" if options.kind == "sampler" else "mean")
        loss.backward()
        step.log(loss=loss)
    optimizer.step()
    counter = counter + 1
    if options.kind == "counter" and counter > 4:
        # What a worker does depends on how long it has been there.
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.999)
    if options.kind == "leader" and step.number == 5 and job.is_leader:
        with torch.no_grad():
            model(x[:8])
    if options.kind == "frozen" and step.number == 5:
        model[0 if job.is_leader else 4].requires_grad_(False)
