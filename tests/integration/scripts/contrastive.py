"""A small SimCLR: two views of each sample, batch norm and dropout, and a loss over all pairs of the global batch.

The point "computed" of its own is reached in every run of the inner loop's body: in both passes over a microbatch.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import craft
from craft import testing

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=16)
parser.add_argument("--slow-until", type=Path, help="steps take longer until there is such a file")
arguments = parser.parse_args()

testing.arm()
job = craft.join()
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
samples = TensorDataset(torch.randn(88, 6))
encoder = torch.nn.Sequential(
    torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 5)
).to(job.device)
temperature = torch.nn.Linear(1, 1, bias=False).to(job.device)
optimizer = torch.optim.AdamW([*encoder.parameters(), *temperature.parameters()], lr=1e-2)
job.replicate(encoder)
job.replicate(temperature)
job.register(optimizer=optimizer)


def contrast(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The NT-Xent loss over a whole batch."""
    rows = F.normalize(torch.cat([left, right]))
    logits = temperature((rows @ rows.t()).unsqueeze(-1)).squeeze(-1) * 4
    logits = logits.masked_fill(torch.eye(len(rows), dtype=torch.bool, device=rows.device), -1e9)
    return F.cross_entropy(logits, torch.arange(len(rows), device=rows.device).roll(len(left)))


# The last batch of a pass has 16 samples, the others 24: their microbatches weigh differently.
for step in job.steps(samples, global_batch=24, microbatches=6, steps=arguments.steps, seed=1):
    for (x,) in step:
        x = x.to(job.device)
        views = [x + 0.1 * torch.randn_like(x) for _ in range(2)]
        loss = contrast(*(step.gather(encoder(view)) for view in views))
        loss.backward()
        step.log(loss=loss)
        testing.reach("computed", step.number)
    optimizer.step()
    if arguments.slow_until is not None and not arguments.slow_until.exists():
        time.sleep(0.15)
