"""A GAN with a loop of its own: two optimizers, batch norm, a moving average in a buffer, state that is no object's.

Points of its own for faults, in the body of an attempt: "discriminator" and "generator" (their microbatches), "between" (one
optimizer has stepped, the other has not), "updated" (both have, and the step is not committed).
"""

from __future__ import annotations

import argparse
import faulthandler
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import craft
from craft import testing

faulthandler.register(signal.SIGUSR1)
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=16)
parser.add_argument("--width", type=int, default=24, help="of the hidden layers")
parser.add_argument("--microbatches", type=int, default=6)
parser.add_argument("--slow-until", type=Path, help="steps take --slow-s longer until there is such a file")
parser.add_argument("--slow-s", type=float, default=0.25)
parser.add_argument("--evaluate", action="store_true", help="calls between the steps, too")
arguments = parser.parse_args()


class Average(torch.nn.Module):
    """A moving average of another module's parameters, in buffers."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        for index, param in enumerate(module.parameters()):
            self.register_buffer(f"mean{index}", param.detach().clone())

    @torch.no_grad()
    def update(self, module: torch.nn.Module) -> None:
        for index, param in enumerate(module.parameters()):
            getattr(self, f"mean{index}").lerp_(param, 0.1)


testing.arm()
job = craft.join()
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
real = TensorDataset(torch.randn(208, 2).cumsum(dim=1))
width = arguments.width
generator = torch.nn.Sequential(
    torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.ReLU(), torch.nn.Linear(width, 2)
).to(job.device)
discriminator = torch.nn.Sequential(
    torch.nn.Linear(2, width), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(width, 1)
).to(job.device)
average = Average(generator)
update_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
update_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
balance = {"lead": 0.0, "steps": 0}

for module in (generator, discriminator, average):
    job.replicate(module)
job.register(update_g=update_g, update_d=update_d)
job.register_state(save=lambda: dict(balance), load=balance.update)

# The last batch of a pass has 16 samples, the others 32: their microbatches weigh differently.
for attempt in job.attempts(real, global_batch=32, microbatches=arguments.microbatches, steps=arguments.steps, seed=3):
    with attempt:
        for (x,) in attempt.microbatches(discriminator.parameters()):
            fake = generator(torch.randn(len(x), 4, device=job.device)).detach()
            loss_d = F.softplus(-discriminator(x.to(job.device))).mean() + F.softplus(discriminator(fake)).mean()
            loss_d.backward()
            attempt.log(loss_d=loss_d)
            testing.reach("discriminator", attempt.step)
        update_d.step()
        testing.reach("between", attempt.step)
        for (x,) in attempt.microbatches(generator.parameters()):
            loss_g = F.softplus(-discriminator(generator(torch.randn(len(x), 4, device=job.device)))).mean()
            loss_g.backward()
            attempt.log(loss_g=loss_g)
            testing.reach("generator", attempt.step)
        update_g.step()
        average.update(generator)
        balance["lead"] += 0.1 * (attempt.metrics["loss_g"] - attempt.metrics["loss_d"]) + 1e-3 * torch.rand(()).item()
        balance["steps"] += 1
        if arguments.slow_until is not None and not arguments.slow_until.exists():
            # Whoever a test waits for comes before the end, on however slow a machine.
            time.sleep(arguments.slow_s if attempt.step < 10 else 8 * arguments.slow_s)
        testing.reach("updated", attempt.step)
    if attempt.committed and arguments.evaluate and attempt.step % 3 == 0:
        balance["lead"] += job.evaluate(
            real, lambda batch: {"mean": discriminator(batch[0].to(job.device)).mean()}, batch_size=20
        )["mean"]
        assert balance["steps"] == job.step
