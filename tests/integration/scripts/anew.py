"""A job that begins anew in step 0, after w2 took the result of a call from a member that is gone then."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import craft

folder = Path(sys.argv[1])
"""Empty: nothing fails."""
kills = len(sys.argv) > 2


def die_once(name: str) -> None:
    if kills and not (folder / name).exists():
        (folder / name).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for(name: str) -> None:
    while kills and not (folder / name).exists():
        time.sleep(0.01)


job = craft.join()
rate = job.broadcast_object({"rate": 0.1})["rate"]
if job.worker_id == "w2":
    (folder / "recalled").touch()
    # w1 is to be gone when this one goes on.
    wait_for("w1")
    time.sleep(1.0)
torch.manual_seed(0)
model = job.replicate(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
job.register(optimizer=optimizer)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
for step in job.steps(data, global_batch=8, microbatches=4, steps=5, seed=0):
    optimizer.zero_grad()
    for x, y in step:
        if job.worker_id == "w0":
            die_once("w0")
        if job.worker_id == "w1":
            wait_for("recalled")
            die_once("w1")
        F.mse_loss(model(x), y).backward()
    optimizer.step()
