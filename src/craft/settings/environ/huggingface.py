"""Hide environment variables of a worker from accelerate."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_OF_MPI = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


@contextmanager
def alone() -> Iterator[None]:
    """Make this process look like one that runs alone."""
    hidden = {name: os.environ.pop(name) for name in (*_PLACE, *_OF_MPI) if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
