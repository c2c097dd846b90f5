"""A small job whose workers end with exit code 0 in the middle of it: ``leaves.py HOW WHERE [WORKER]``.

With the HOW ``stops`` they stop as their processes end.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys

import torch
import torch.nn.functional as F

import craft

HOW, WHERE = sys.argv[1:3]
WORKER = sys.argv[3] if len(sys.argv) > 3 else None
LEAVES_AT = 7


def leave() -> None:
    if WORKER is not None and job.worker_id != WORKER:
        return
    if HOW == "os._exit":
        os._exit(0)
    sys.exit(0)


if WHERE == "before_join":
    sys.exit(0) if HOW == "sys.exit" else os._exit(0)
torch.manual_seed(0)
job = craft.join()
model = job.replicate(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job.register(optimizer=optimizer)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
for step in job.steps(data, global_batch=8, microbatches=4, steps=20, seed=0):
    optimizer.zero_grad()
    for x, y in step:
        if step.number == LEAVES_AT and WHERE == "in_a_step":
            leave()
        F.mse_loss(model(x), y).backward()
    optimizer.step()
    if step.number == LEAVES_AT and WHERE == "between_steps":
        leave()
if WHERE == "after_loop":
    leave()
if HOW == "stops" and job.worker_id == WORKER:
    atexit.register(os.kill, os.getpid(), signal.SIGSTOP)
