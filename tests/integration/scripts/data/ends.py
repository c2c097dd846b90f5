"""Ends its loop before all steps are done, in one way or another."""

import argparse

import torch

import craft

parser = argparse.ArgumentParser()
parser.add_argument("how", choices=["stop-inside", "stop-outside", "break-inner"])
options = parser.parse_args()

torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
job = craft.join()
model = job.replicate(model)
for step in job.steps(torch.ones(12, 1), global_batch=12, steps=1000):
    chosen = step.number == 3 and job.worker_id == "w1"
    for x in step:
        model(x).mean().backward()
        if chosen and options.how == "stop-inside":
            job.stop("w1 has seen enough")
        if step.number == 3 and options.how == "break-inner":
            break
    if chosen and options.how == "stop-outside":
        job.stop("w1 has seen enough")
print(f"ended after {job.step} steps")
