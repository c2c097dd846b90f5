"""The leader prints each step; told to by its arguments, a leader is killed after it printed one, or fails after the loop."""

from __future__ import annotations

import argparse
import multiprocessing.connection
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import craft
from craft import testing

testing.arm()
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--kill-at", type=int, default=0)
parser.add_argument("--chatter", type=int, default=0)
parser.add_argument("--stuck", default="", help="this worker never comes to its first step, and ignores SIGTERM")
parser.add_argument("--fail", action="store_true")
parser.add_argument("--sockets", action="store_true", help="open a socket of multiprocessing's, and print a hash")
options = parser.parse_args()

print("loading")
if os.environ["CRAFT_WORKER_ID"] == options.stuck:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("stuck", flush=True)
    signal.pause()
if options.sockets:
    listener = multiprocessing.connection.Listener(family="AF_UNIX")
    print("hash", hash("craft"), "socket", listener.address)
job = craft.join()
testing.reach("loading", 0)
torch.manual_seed(0)
model = job.replicate(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.register(optimizer=optimizer)
data = [(torch.full((4,), float(index)), index % 2) for index in range(16)]
for step in job.steps(data, global_batch=8, microbatches=4, steps=options.steps, seed=0):
    optimizer.zero_grad()
    for x, y in step:
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    if options.stuck and job.step == options.steps - 1:
        log = Path(os.environ["CRAFT_RUN_DIR"]) / "workers" / options.stuck / "log"
        while not (log.exists() and "stuck" in log.read_text()):
            time.sleep(0.01)
    if not job.is_leader:
        continue
    print(f"\x1b[31mstep {job.step}\x1b[0m\x1b[2K", file=sys.stderr if job.step % 2 else sys.stdout)
    for number in range(options.chatter):
        print("chatter", number, "." * 60)
    if job.step == options.kill_at and job.worker_id == "w0":
        os.write(1, b"\xff\x00 last words")
        os.kill(os.getpid(), signal.SIGKILL)
print(f"{job.worker_id} is done")
if options.fail and job.is_leader:
    raise ValueError("a bug after the loop")
