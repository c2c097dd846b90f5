"""A job that asks all workers together for things between its steps, and keeps what it heard in its state."""

import argparse
import faulthandler
import signal
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import craft
from craft import testing

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--slow-until", type=Path, help="every microbatch takes --slow-s longer until this file is there")
parser.add_argument("--slow-s", type=float, default=0.05, help="ten times as much from the middle on")
options = parser.parse_args()
faulthandler.register(signal.SIGUSR1, all_threads=True)
testing.arm()


class Heard(torch.nn.Module):
    """What the calls returned, as state: so a worker that heard something else would be found out."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4, dtype=torch.float64))


torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
heard = Heard()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
inputs = torch.randn(64, 8)
train = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
held_out = TensorDataset(inputs[:37] + 1, inputs[:37].sum(dim=1, keepdim=True))


def score(batch: list[torch.Tensor]) -> dict[str, float]:
    x, y = batch
    noise = 0.01 * torch.randn(())
    return {"error": float((model(x) - y).abs().mean() + noise), "samples": float(len(x))}


job = craft.join()
model = job.replicate(model)
job.register(optimizer=optimizer, heard=heard)
for step in job.steps(train, global_batch=16, microbatches=4, steps=options.steps, seed=3):
    optimizer.zero_grad()
    for x, y in step:
        if options.slow_until is not None and not options.slow_until.exists():
            # Whoever a test waits for comes before the end, on however slow a machine.
            time.sleep(options.slow_s if step.number < options.steps // 2 else 10 * options.slow_s)
        loss = (model(x) - y).pow(2).mean()
        loss.backward()
        step.log(loss=loss)
    optimizer.step()
    testing.reach("before_evaluate", step.number)
    error = job.evaluate(held_out, score, batch_size=5)["error"]
    testing.reach("before_all_reduce", step.number)
    mean = job.all_reduce(torch.tensor([float(step.number)], dtype=torch.float64)) / job.all_reduce(torch.ones(1))
    testing.reach("before_broadcast", step.number)
    told = job.broadcast_object({"step": step.number, "words": ["a", None, 1.5]})
    testing.reach("before_barrier", step.number)
    job.barrier()
    assert told == {"step": step.number, "words": ["a", None, 1.5]}
    with torch.no_grad():
        heard.seen += torch.tensor([error, float(mean), float(told["step"]), 1.0], dtype=torch.float64)
