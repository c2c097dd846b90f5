"""What a microbatch comes to depends on who computes it."""

import os

import torch

import craft

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)

job = craft.join()
model = job.replicate(model)
for step in job.steps(torch.ones(6, 4), global_batch=6, microbatches=3, steps=2):
    for x in step:
        model(x + 1e-3 * (os.environ["RANK"] == "1")).sum().backward()
