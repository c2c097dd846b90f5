"""A small job with a state of some hundred chunks, of which a half never changes; and a store that fails every second request."""

import argparse
import itertools
import random
import threading
from typing import Any

import fsspec
import torch
import torch.nn.functional as F
from fsspec.implementations.local import LocalFileSystem

import craft

_requests = itertools.count(random.randrange(2))
_within = threading.local()


class Flaky(LocalFileSystem):  # type: ignore[misc]
    """Files of this machine, behind something that fails every second time."""

    protocol = ("flaky",)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(str(path).removeprefix("flaky://"))


def _flaky(inherited: Any) -> Any:
    def call(self: Flaky, *args: Any, **kwargs: Any) -> Any:
        # What a request is made of is no request of its own.
        if getattr(_within, "request", False):
            return inherited(self, *args, **kwargs)
        if next(_requests) % 2:
            raise OSError("the store is away for a moment")
        _within.request = True
        try:
            return inherited(self, *args, **kwargs)
        finally:
            _within.request = False

    return call


for _name in ("ls", "find", "info", "cat_file", "pipe_file", "put_file", "get_file", "mv", "rm_file", "open", "exists"):
    setattr(Flaky, _name, _flaky(getattr(LocalFileSystem, _name)))
fsspec.register_implementation("flaky", Flaky)

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(160, 160) for _ in range(8)))
for layer in list(model)[:4]:
    layer.requires_grad_(False)
optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)
generator = torch.Generator().manual_seed(1)
data = torch.randn(64, 160, generator=generator)

job = craft.join()
model = job.replicate(model)
job.register(optimizer=optimizer)
for step in job.steps(data, global_batch=8, microbatches=4, steps=options.steps, seed=0):
    optimizer.zero_grad()
    for x in step:
        F.mse_loss(model(x), x).backward()
    optimizer.step()
