"""A loop that CRAFT does not own at all: gradients are summed by calls, and it is left by a break."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import craft
from craft import testing

parser = argparse.ArgumentParser()
parser.add_argument("--slow-until", type=Path)
parser.add_argument("--steps", type=int, default=12)
arguments = parser.parse_args()

testing.arm()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
update = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
done = 0
job = craft.join()


def save() -> dict[str, Any]:
    return {"model": model.state_dict(), "update": update.state_dict(), "done": done}


def load(state: dict[str, Any]) -> None:
    global done
    model.load_state_dict(state["model"])
    update.load_state_dict(state["update"])
    done = state["done"]


job.register_state(save=save, load=load)
for attempt in job.attempts():
    with attempt:
        for param in model.parameters():
            param.grad = torch.full_like(param, float(done + 1))
        for param in model.parameters():
            assert param.grad is not None
            job.all_reduce(param.grad)
            param.grad /= job.world_size
        testing.reach("after_calls", attempt.step)
        update.step()
        assert job.broadcast_object(done) == done
        job.barrier()
        done += 1
    if arguments.slow_until is not None and not arguments.slow_until.exists():
        # Whoever a test waits for comes before the end, on however slow a machine.
        time.sleep(0.3 if done < arguments.steps - 4 else 5.0)
    if done >= arguments.steps:
        break
print(f"done {done}")
