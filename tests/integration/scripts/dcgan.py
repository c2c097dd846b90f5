"""The loop of a DCGAN: pictures that the discriminator's part of a step makes are used again in the generator's.

Both networks have batch norm, and the generator's graph of one part is run backward in the next one. Schedulers step after the
``with``, whatever came of the attempt. Points of its own for faults: "between" (one optimizer has stepped, the other has not).
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
parser.add_argument("--steps", type=int, default=14)
parser.add_argument("--slow-until", type=Path, help="steps take longer until there is such a file")
arguments = parser.parse_args()

testing.arm()
job = craft.join()
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
pictures = TensorDataset(torch.randn(96, 1, 8, 8))
generator = torch.nn.Sequential(
    torch.nn.ConvTranspose2d(6, 8, 4, bias=False),
    torch.nn.BatchNorm2d(8),
    torch.nn.ReLU(),
    torch.nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False),
    torch.nn.Tanh(),
)
discriminator = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 4, 2, 1, bias=False),
    torch.nn.BatchNorm2d(8),
    torch.nn.LeakyReLU(0.2),
    torch.nn.Conv2d(8, 1, 4, bias=False),
    torch.nn.Flatten(0),
)
update_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
update_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
schedule_d = torch.optim.lr_scheduler.ExponentialLR(update_d, 0.97)
schedule_g = torch.optim.lr_scheduler.ExponentialLR(update_g, 0.97)
job.replicate(generator)
job.replicate(discriminator)
job.register(update_d=update_d, update_g=update_g, schedule_d=schedule_d, schedule_g=schedule_g)


def error(x: torch.Tensor, label: float) -> torch.Tensor:
    output = discriminator(x)
    return F.binary_cross_entropy_with_logits(output, torch.full_like(output, label))


for attempt in job.attempts(pictures, global_batch=24, microbatches=6, steps=arguments.steps, seed=1):
    with attempt:
        fakes = []
        for (real,) in attempt.microbatches(discriminator.parameters()):
            errors = error(real, 1.0)
            errors.backward()
            fake = generator(torch.randn(len(real), 6, 1, 1))
            fakes.append(fake)
            errors_of_fakes = error(fake.detach(), 0.0)
            errors_of_fakes.backward()
            attempt.log(loss_d=errors.detach() + errors_of_fakes.detach())
        update_d.step()
        testing.reach("between", attempt.step)
        for index, _ in enumerate(attempt.microbatches(generator.parameters())):
            errors = error(fakes[index], 1.0)
            errors.backward()
            attempt.log(loss_g=errors)
        update_g.step()
        if arguments.slow_until is not None and not arguments.slow_until.exists():
            time.sleep(0.2)
    schedule_d.step()
    schedule_g.step()
assert schedule_d.last_epoch == schedule_g.last_epoch == arguments.steps, schedule_d.last_epoch
