"""A small FSDP2 job that trains until it is stopped, or for ``--steps``; see ``endless.py``."""

import argparse
import faulthandler
import signal
import time

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset

import craft

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10**9)
parser.add_argument("--pause-ms", type=float, default=0.0, help="of each microbatch")
options = parser.parse_args()

# A test whose job hangs asks for the stacks of all threads.
faulthandler.register(signal.SIGUSR1, all_threads=True)


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Draws random numbers for every sample, as augmentation does."""

    def __init__(self) -> None:
        self._inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        sample = self._inputs[index]
        return sample + 0.1 * torch.randn(8), (sample[:4].sum() > 0).long()


def block(inputs: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(inputs, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Dropout(0.2)
    )


job = craft.join()
mesh = job.mesh(shard=job.replica_size)
torch.manual_seed(0)
model: torch.nn.Module = torch.nn.Sequential(block(8), block(32), torch.nn.Linear(32, 2))
for part in list(model.children())[:2]:
    fully_shard(part, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=500)
model = job.replicate(model)
job.register(optimizer=optimizer, scheduler=scheduler)
for step in job.steps(Noisy(), global_batch=24, microbatches=6, steps=options.steps, seed=1):
    optimizer.zero_grad()
    for x, y in step:
        time.sleep(options.pause_ms / 1e3)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        step.log(loss=loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
