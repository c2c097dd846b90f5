"""A small job in which a sample is not a number: what follows is the job's answer.

``--without`` leaves the data of some steps out from the start: what a job should come to that went back and skipped them.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import craft
from craft import testing

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument(
    "--poison", type=int, nargs="*", default=[], help="steps, by their data, with a sample that is no number"
)
parser.add_argument("--spike", type=int, nargs="*", default=[], help="steps, by their data, with a loss that is huge")
parser.add_argument("--workers", type=int, default=1, help="steps are slow while there are fewer")
parser.add_argument("--without", type=int, nargs=2, default=(0, 0), help="leave the data of steps A to B-1 out")
parser.add_argument("--await-checkpoint", type=Path, help="before the first poisoned step, wait for a manifest in here")
parser.add_argument("--finite-loss", action="store_true", help="only gradients show it")
options = parser.parse_args()
testing.arm()

BATCH = 8
generator = torch.Generator().manual_seed(0)
inputs = torch.randn(120 * BATCH, 8, generator=generator)
for number in options.poison:
    inputs[number * BATCH + 5, 3] = float("nan")
for number in options.spike:
    inputs[number * BATCH : (number + 1) * BATCH] *= 1000
inputs = torch.cat([inputs[: options.without[0] * BATCH], inputs[options.without[1] * BATCH :]])


torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
job = craft.join()
model = job.replicate(model)
job.register(optimizer=optimizer, scheduler=scheduler)
for step in job.steps(inputs, global_batch=BATCH, microbatches=4, steps=options.steps, seed=3, shuffle=False):
    if options.await_checkpoint and job.branch == 0 and step.number == (options.poison + options.spike)[0] - 2:
        while not any((options.await_checkpoint / "manifests").glob("*-000000000010-*.json")):
            time.sleep(0.01)
    optimizer.zero_grad()
    for x in step:
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        step.log(loss=0.0 if options.finite_loss else loss)
        # So that somebody who joins in the middle of it still finds it going on.
        time.sleep(0.1 if job.world_size < options.workers else 0.002)
    testing.reach("update", step.number)
    optimizer.step()
    scheduler.step()
    assert not any(group["lr"] < 1e-3 for group in optimizer.param_groups), "a scheduler has seen a lowered rate"
