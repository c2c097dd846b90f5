"""A job that shows what holding gradients takes, and gradients that come late: a second backward that nobody expected.

Each worker's last line says, as JSON, how much of its device was in use at most beside its parameters, in gradients of the model.
"""

import argparse
import faulthandler
import json
import signal

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import craft
from craft import testing

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--layers", type=int, default=3)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--microbatches", type=int, default=3)
parser.add_argument("--late-at", type=int, nargs="*", default=[], help="steps of which a gradient comes late")
options = parser.parse_args()

faulthandler.register(signal.SIGUSR1, all_threads=True)
testing.arm()
job = craft.join()
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
layers = [torch.nn.Linear(options.width, options.width, bias=False) for _ in range(options.layers)]
model = torch.nn.Sequential(*layers).to(job.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

model = job.replicate(model)
job.register(optimizer=optimizer)
inputs = torch.randn(240, options.width)
data = TensorDataset(inputs, inputs.roll(1, dims=1))
for step in job.steps(data, global_batch=12, microbatches=options.microbatches, steps=options.steps, seed=0):
    optimizer.zero_grad()
    if step.number == 2:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    for x, y in step:
        loss = F.mse_loss(F.dropout(model(x.to(job.device)), 0.1), y.to(job.device))
        loss.backward()
        if step.number in options.late_at and step.microbatch == 1:
            (layers[-1].weight.sin().sum() * 0.001).backward()
        step.log(loss=loss)
    optimizer.step()

parameters = sum(param.numel() * param.element_size() for param in model.parameters())
most = torch.cuda.max_memory_allocated() - parameters
print(json.dumps({"gradient_bytes": parameters, "most": round(most / parameters, 3)}))
