"""Streams of the given lengths; says which items each microbatch got."""

import argparse
from collections.abc import Iterator

import torch

import craft
from craft import testing

parser = argparse.ArgumentParser()
parser.add_argument("lengths", type=int, nargs="+")
options = parser.parse_args()
testing.arm()


def stream(microbatch: int, num_microbatches: int, start_step: int) -> Iterator[tuple[int, torch.Tensor]]:
    assert num_microbatches == len(options.lengths)
    for step in range(start_step, options.lengths[microbatch]):
        yield step, torch.full((2, 1), float(100 * microbatch + step))


torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
job = craft.join()
model = job.replicate(model)
for step in job.steps(stream, microbatches=len(options.lengths)):
    for item, values in step:
        print(f"used {step.number} {step.microbatch} {item}")
        model(values).mean().backward()
        step.log(mean=values.mean())
print(f"ended after {job.step} steps")
