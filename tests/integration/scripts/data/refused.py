"""Gives the loop something that it cannot take over."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import craft

model = torch.nn.Linear(1, 1)
job = craft.join()
model = job.replicate(model)
loader = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=None)
for step in job.steps(loader, steps=3):
    for (x,) in step:
        model(x).mean().backward()
