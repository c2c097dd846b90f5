"""torch.compile under ``TrainingArguments(torch_compile=True)``: which kernels run depends on a batch's shape alone.

By default a second shape makes torch compile kernels for all shapes, and use them from then on. Which kernels compute a
microbatch, and so its bits, would depend on what this worker has computed before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MAX_SHAPES = 256
"""Past its limit torch would go on without compiled kernels, which has other bits; here it is an error."""


@contextmanager
def by_shape(compiles: bool) -> Iterator[None]:
    """Within it, torch compiles once for each shape, and does not stop doing so."""
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
