"""A small job with all that makes bits hard to keep: dropout, batch norm, random data, a schedule, a moving average,
and switches that no state has: a layer is frozen at times, and another one in ``eval()``.

Its own points for faults: forward and backward (each microbatch), update (after the inner loop of each step).
"""

import argparse
import faulthandler
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import Dataset

import craft
from craft import testing

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--microbatches", type=int, default=8)
parser.add_argument("--width", type=int, default=64, help="of the hidden layers; 2000 makes messages of several MB")
parser.add_argument("--loaders", type=int, default=0, help="loader processes of each worker")
parser.add_argument(
    "--slow-until",
    type=Path,
    help="every microbatch takes longer until this file is there, far longer from the middle on",
)
parser.add_argument("--switch-every", type=int, default=7, help="steps after which a layer is frozen, or trained again")
parser.add_argument("--drift-at", type=int, help="after this step, a dropout rate changes that nothing registers")
parser.add_argument("--nan-at", type=int, help="the loss of this step is no number")
options = parser.parse_args()

# A test whose job hangs asks for the stacks of all threads.
faulthandler.register(signal.SIGUSR1, all_threads=True)
testing.arm()


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Draws random numbers for every sample, as augmentation does."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(160, 16, generator=generator)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        sample = self._inputs[index]
        return sample + 0.1 * torch.randn(16), (sample[:4].sum() > 0).long()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, options.width)
        self.norm = torch.nn.BatchNorm1d(options.width)
        self.middle = torch.nn.Linear(options.width, options.width)
        self.drop = torch.nn.Dropout(0.2)
        self.last = torch.nn.Linear(options.width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(F.relu(self.first(x)))
        testing.reach("forward", job.step)
        hidden = self.drop(F.relu(self.middle(hidden)))
        hidden.register_hook(lambda _: testing.reach("backward", job.step))
        return self.last(hidden)  # type: ignore[no-any-return]


class MovingAverage:
    """Of the parameters; follows the job because it is registered."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._averages = {name: param.detach().clone() for name, param in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: torch.nn.Module) -> None:
        for name, param in model.named_parameters():
            self._averages[name].lerp_(param, 0.1)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._averages

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._averages = state


job = craft.join()
device = job.device
torch.use_deterministic_algorithms(device.type == "cuda")
torch.manual_seed(0)
model = Net().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)
average = MovingAverage(model)

model = job.replicate(model)
job.register(optimizer=optimizer, scheduler=scheduler, average=average)
for step in job.steps(
    Noisy(),
    global_batch=32,
    microbatches=options.microbatches,
    steps=options.steps,
    seed=1,
    num_workers=options.loaders,
):
    optimizer.zero_grad()
    for x, y in step:
        if options.slow_until is not None and not options.slow_until.exists():
            # Whoever a test waits for comes before the end, on however slow a machine.
            time.sleep(0.01 if step.number < options.steps // 2 else 0.1)
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        if step.number == options.nan_at:
            loss = loss * float("nan")
        loss.backward()
        step.log(loss=loss)
    testing.reach("update", step.number)
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    average.update(model)
    if step.number == options.drift_at:
        model.drop.p = 0.4
    if step.number % options.switch_every == options.switch_every // 2:
        on = step.number // options.switch_every % 2 == 1
        model.first.requires_grad_(on)
        model.drop.train(on)
