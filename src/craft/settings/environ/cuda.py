"""What torch reads in the environment where it looks for GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


@contextmanager
def without_cuda() -> Iterator[None]:
    """Within it torch asks NVML whether there are GPUs. A process that has asked CUDA cannot fork one that uses them."""
    is_given = _BY_NVML in os.environ
    os.environ.setdefault(_BY_NVML, "1")
    try:
        yield
    finally:
        if not is_given:
            del os.environ[_BY_NVML]
