"""torch.compile under ``TrainingArguments(torch_compile=True)``: make kernels depend on a batch's shape only.

By default a second shape makes torch compile kernels for all shapes, and use them from then on. The kernels of a microbatch,
and so its bits, would depend on what this worker has computed before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MAX_SHAPES = 256
"""Past its limit torch would continue without compiled kernels, which changes bits; here it is an error."""


@contextmanager
def by_shape(compiles: bool) -> Iterator[None]:
    """Make torch compile once for each shape, without a limit."""
    if not compiles:
        yield
        return
    with torch._dynamo.config.patch(
        automatic_dynamic_shapes=False,
        assume_static_by_default=True,
        recompile_limit=_MAX_SHAPES,
        accumulated_recompile_limit=8 * _MAX_SHAPES,
        fail_on_recompile_limit_hit=True,
    ):
        yield
