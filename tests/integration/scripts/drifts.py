"""A job whose script changes an attribute in its loop that nothing registers: a worker that comes later does not have it.

--loop says where it shows: in the body of an own loop, in the rows that a whole-batch loss gathers, or in that loss alone.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import craft
from craft import testing

parser = argparse.ArgumentParser()
parser.add_argument("--loop", choices=["own", "rows", "loss"], required=True)
parser.add_argument("--slow-until", type=Path, help="every microbatch takes longer until this file is there")
options = parser.parse_args()
testing.arm()

DRIFTS_AT = 5
STEPS = 60
torch.manual_seed(0)
x = torch.randn(400, 16)
data = TensorDataset(x, (x.sum(1) > 0).long())
dropout = torch.nn.Dropout(0.1)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), dropout, torch.nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
factor = 1.0
job = craft.join()
model = job.replicate(model)
job.register(optimizer=optimizer)


def wait() -> None:
    if options.slow_until is not None and not options.slow_until.exists():
        time.sleep(0.01)


def own_loop() -> None:
    for attempt in job.attempts(data, global_batch=24, microbatches=6, steps=STEPS):
        with attempt:
            for inputs, labels in attempt.microbatches(model.parameters()):
                wait()
                loss = F.cross_entropy(model(inputs), labels)
                loss.backward()
                attempt.log(loss=loss)
            optimizer.step()
        if attempt.step == DRIFTS_AT:
            dropout.p = 0.5


def gathering_loop() -> None:
    global factor
    for step in job.steps(data, global_batch=24, microbatches=6, steps=STEPS):
        optimizer.zero_grad()
        for inputs, labels in step:
            wait()
            rows = model(inputs)
            loss = F.cross_entropy(rows, labels) + factor * step.gather(rows).mean(0).pow(2).sum()
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
        if step.number == DRIFTS_AT and options.loop == "rows":
            dropout.p = 0.5
        elif step.number == DRIFTS_AT:
            factor = 0.5


own_loop() if options.loop == "own" else gathering_loop()
