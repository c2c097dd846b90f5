"""The environment variable by which torch decides how to detect GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


@contextmanager
def without_cuda() -> Iterator[None]:
    """Make torch ask NVML whether there are GPUs: a process that has initialised CUDA cannot fork users of it."""
    is_given = _BY_NVML in os.environ
    os.environ.setdefault(_BY_NVML, "1")
    try:
        yield
    finally:
        if not is_given:
            del os.environ[_BY_NVML]
