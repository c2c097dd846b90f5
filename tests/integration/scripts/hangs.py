"""A job in which one worker, once, does something that does not end: --kind says what, at step --at."""

import argparse
import ctypes
import os
import re
import threading
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset

import craft

parser = argparse.ArgumentParser()
parser.add_argument("--kind", default="none")
parser.add_argument("--at", type=int, default=30)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--seconds", type=float, default=3600.0)
options = parser.parse_args()
IN_A_MICROBATCH = ("loop", "sleep", "gil", "gil_thread", "gil_for_a_while", "deadlock")


def claim() -> bool:
    """True in one process of the job, once."""
    run_dir = os.environ.get("CRAFT_RUN_DIR")
    if run_dir is None:
        return False
    try:
        (Path(run_dir) / "hung").open("x").close()
    except FileExistsError:
        return False
    return True


def keep_the_gil() -> None:
    """A search that never ends, in C, which does not let go of the GIL."""
    re.match("(a+)+$", "a" * 64 + "b")


def hang(kind: str) -> None:
    if kind == "loop":
        while True:
            pass
    elif kind == "sleep":
        time.sleep(options.seconds)
    elif kind == "gil":
        keep_the_gil()
    elif kind == "gil_thread":
        thread = threading.Thread(target=keep_the_gil)
        thread.start()
        thread.join()
    elif kind == "gil_for_a_while":
        ctypes.PyDLL(None).sleep(int(options.seconds))
    elif kind == "deadlock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif kind == "raise":
        raise ValueError("unexpected")


class Data(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if options.kind == "loader" and job.step == options.at and claim():
            time.sleep(options.seconds)
        return torch.full((4,), float(index))


torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
job = craft.join()
model = job.replicate(model)
job.register(optimizer=optimizer)
for step in job.steps(Data(), global_batch=8, microbatches=4, steps=options.steps, seed=0):
    optimizer.zero_grad()
    for x in step:
        if options.kind in IN_A_MICROBATCH and step.number == options.at and claim():
            hang(options.kind)
        model(x).mean().backward()
    optimizer.step()
    if options.kind == "update" and step.number == options.at and claim():
        time.sleep(options.seconds)
    if options.kind == "paused" and step.number == options.at and claim():
        with job.paused("evaluation"):
            time.sleep(options.seconds)
    if options.kind == "all_slow" and step.number == options.at:
        time.sleep(options.seconds)
