"""Says which samples each microbatch holds, and logs their mean."""

import argparse

import torch
from torch.utils.data import DataLoader

import craft
from craft import testing

parser = argparse.ArgumentParser()
parser.add_argument("--loader", action="store_true", help="give a DataLoader instead of a dataset")
parser.add_argument("--microbatches", type=int)
options = parser.parse_args()
testing.arm()

SAMPLES = list(range(22))


def collate(samples: list[int]) -> torch.Tensor:
    return torch.tensor(samples, dtype=torch.float32)


torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
job = craft.join()
model = job.replicate(model)
if options.loader:
    loader = DataLoader(SAMPLES, batch_size=8, drop_last=True, collate_fn=collate, num_workers=1)  # type: ignore[arg-type, var-annotated]
    steps = job.steps(loader, microbatches=options.microbatches, steps=5)
else:
    steps = job.steps(
        SAMPLES, global_batch=8, microbatches=options.microbatches, epochs=2, collate_fn=collate, num_workers=2
    )
for step in steps:
    for samples in step:
        print(f"used {step.number} {step.microbatch} {samples.int().tolist()}")
        model(samples[:, None]).mean().backward()
        step.log(mean=samples.mean())
print(f"ended after {job.step} steps in epoch {job.epoch}")
