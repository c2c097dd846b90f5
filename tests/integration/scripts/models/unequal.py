"""Every worker builds other parameters than the next one."""

import os

import torch

import craft

torch.manual_seed(int(os.environ["RANK"]))
model = torch.nn.Linear(4, 1)

job = craft.join()
model = job.replicate(model)
for step in job.steps(torch.ones(6, 4), global_batch=6, microbatches=3, steps=2):
    print(f"{job.worker_id} begins step {step.number} with {model.weight[0].tolist()}")
    for x in step:
        model(x).sum().backward()
