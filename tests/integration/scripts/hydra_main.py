"""A script under hydra, whose main function makes an exit code of every exception."""

from __future__ import annotations

import hydra
import torch
from torch import nn

import craft


@hydra.main(version_base=None)
def main(config: object) -> None:
    job = craft.join()
    model = job.replicate(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.register(optimizer=optimizer)
    data = torch.utils.data.TensorDataset(torch.ones(64, 2))
    for step in job.steps(data, global_batch=8, steps=20):
        optimizer.zero_grad()
        for (x,) in step:
            if step.number == 5:
                raise ValueError("the data is bad")
            model(x).sum().backward()
        optimizer.step()


main()
