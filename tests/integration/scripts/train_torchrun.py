"""A small job that torchrun can start as well as ``craft run``."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record

import craft


@record
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--slow-until", type=Path, help="steps take longer until there is such a file")
    parser.add_argument("--fail-at", type=int, help="raise in this step")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(96, 8)
    data = torch.utils.data.TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())

    job = craft.join()
    job.replicate(model)
    job.register(optimizer=optimizer)
    for step in job.steps(data, global_batch=16, microbatches=4, steps=arguments.steps, seed=2):
        optimizer.zero_grad()
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            step.log(loss=loss)
        if step.number == arguments.fail_at:
            raise ValueError("the script's own mistake")
        optimizer.step()
        if arguments.slow_until is not None and not arguments.slow_until.exists():
            time.sleep(0.01 if step.number < 5 else 0.5)


if __name__ == "__main__":
    main()
