"""Random numbers that depend on the place in the job, not on who computes there."""

from __future__ import annotations

import hashlib
import random
import sys

import torch

DATA, BEGIN, COMPUTE, UPDATE, ORDER, EVALUATE = "data", "begin", "compute", "update", "order", "evaluate"


def derive(seed: int, purpose: str, *place: int) -> int:
    """Return 63 bits that are set by ``seed``, ``purpose`` and ``place`` alone."""
    text = f"{seed}/{purpose}/" + "/".join(map(str, place))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_all(value: int) -> None:
    """Seed every generator that user code commonly draws from: torch (CPU and CUDA), numpy and random."""
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)
    random.seed(value)
    # Seeded only if something has imported it: importing numpy for a script that does without would be a waste.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & 0xFFFFFFFF)
