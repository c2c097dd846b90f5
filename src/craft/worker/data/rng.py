"""Random numbers that depend on the place in the job, not on who computes there."""

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
    """Return 63 bits that are set by ``seed``, ``purpose`` and ``place`` alone."""
    text = f"{seed}/{purpose}/" + "/".join(map(str, place))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_all(value: int) -> None:
    """Seed every generator that user code commonly draws from: torch (CPU and CUDA), numpy and random."""
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)
    seed_host(value)


def seed_host(value: int) -> None:
    """Seed the generators of the CPU: torch, numpy and random."""
    torch.default_generator.manual_seed(value)
    random.seed(value)
    # Seeded only if something has imported it: importing numpy for a script that does without would be a waste.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & 0xFFFFFFFF)


@contextmanager
def preserved() -> Iterator[None]:
    """Put the generators of the CPU back afterwards to what they were before."""
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
