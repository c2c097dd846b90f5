"""A script that saves its own file and goes on from it, as many do. ``--forget`` leaves start_step out."""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import craft
from craft import testing

parser = argparse.ArgumentParser()
parser.add_argument("--file", type=Path, required=True)
parser.add_argument("--stop-after", type=int, default=1000)
parser.add_argument("--forget", action="store_true")
parser.add_argument("--workers", type=int, default=1, help="steps are slow while there are fewer")
options = parser.parse_args()
testing.arm()

generator = torch.Generator().manual_seed(0)
inputs = torch.randn(60, 8, generator=generator)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
start = 0
if options.file.exists():
    saved = torch.load(options.file)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["step"]
print(f"begins at {start}")
job = craft.join()
model = job.replicate(model)
job.register(optimizer=optimizer)
begin = 0 if options.forget else start
for step in job.steps(inputs, global_batch=8, microbatches=4, epochs=5, seed=3, start_step=begin):
    optimizer.zero_grad()
    for x in step:
        print(f"used {step.number} {step.microbatch} {x[:, 0].tolist()}")
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        step.log(loss=loss)
        time.sleep(0.05 if job.world_size < options.workers else 0.002)
    optimizer.step()
    testing.reach("updated", step.number)
    if job.is_leader and (step.number + 1) % 5 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step.number + 1}
        torch.save(state, options.file.with_suffix(".new"))
        os.replace(options.file.with_suffix(".new"), options.file)
    if step.number + 2 == options.stop_after:
        job.stop("time is up", final=False)
print(f"ended after {job.step} steps")
