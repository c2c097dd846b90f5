"""A small job in which a bit of the second worker's state changes by itself after a step, as in a failing memory."""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import craft

parser = argparse.ArgumentParser()
parser.add_argument("--flip-after", type=int, help="this step")
parser.add_argument("--await", dest="awaited", type=Path, help="wait here for the checkpoints of steps 5 to 20")
options = parser.parse_args()

inputs = torch.randn(320, 8, generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
job = craft.join()
model = job.replicate(model)
job.register(optimizer=optimizer)
for step in job.steps(inputs, global_batch=8, microbatches=4, steps=40, seed=3):
    if options.awaited is not None and step.number in (5, 10, 15, 20):
        while not any((options.awaited / "manifests").glob(f"*-{step.number:012d}-*.json")):
            time.sleep(0.01)
    optimizer.zero_grad()
    for x in step:
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        step.log(loss=loss)
    optimizer.step()
    if step.number == options.flip_after and job.rank == 1:
        next(model.parameters()).data.view(torch.int32)[0, 0] ^= 1 << 20
