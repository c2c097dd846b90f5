"""Seeds that depend on the step and microbatch, not on the worker that computes it."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

DATA, BEGIN, COMPUTE, UPDATE, ORDER, EVALUATE = "data", "begin", "compute", "update", "order", "evaluate"
ITERATE = "iterate"


def derive(seed: int, purpose: str, *place: int) -> int:
    """Return 63 bits that depend only on ``seed``, ``purpose`` and ``place``."""
    text = f"{seed}/{purpose}/" + "/".join(map(str, place))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_all(value: int) -> None:
    """Seed every generator that scripts commonly use: torch (CPU and CUDA), numpy and random."""
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)
    seed_host(value)


def seed_host(value: int) -> None:
    """Seed the CPU generators: torch, numpy and random."""
    torch.default_generator.manual_seed(value)
    random.seed(value)
    # Only if it is imported: importing numpy for a script that does not use it would waste time.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & 0xFFFFFFFF)


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the states of the CPU generators afterwards."""
    numpy = sys.modules.get("numpy")
    torch_state, random_state = torch.default_generator.get_state(), random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(random_state)
        if numpy is not None and numpy_state is not None:
            numpy.random.set_state(numpy_state)
