"""Backward of the last microbatch does not end before the first blocks of the step have been sent."""

import threading

import torch

import craft
from craft.telemetry import fault_points

LIMIT_S = 20.0

sent = threading.Event()
waited: list[bool] = []


def reached(point: str, step: int, rank: int | None) -> None:
    if point == "blocks_sent":
        sent.set()


def wait_until_sent(grad: torch.Tensor) -> None:
    """In the middle of backward: the later layers have their gradients, the first one has not."""
    # The first step tells in which order gradients come; from the second one on nothing waits for the end.
    # In step 3 one more microbatch is computed, for comparison only: nothing of it is sent.
    if 0 < job.step < 3:
        waited.append(sent.wait(LIMIT_S))


fault_points.listen(reached)
torch.manual_seed(0)
first, rest = torch.nn.Linear(64, 64), torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
model = torch.nn.Sequential(first, rest)

job = craft.join()
model = job.replicate(model)
for step in job.steps(torch.ones(6, 64), global_batch=6, microbatches=3, steps=4):
    for x in step:
        sent.clear()
        hidden = first(x)
        hidden.register_hook(wait_until_sent)
        rest(hidden).square().mean().backward()
assert waited == [True] * 2, waited
