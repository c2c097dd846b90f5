"""Memory that a step frees is for the next step: the C library is not to hand it back to the kernel in between.

glibc does so once more is free at the end of its heap than twice the largest block it ever gave back; what is taken again then
comes as fresh pages, one fault each. A step takes and frees the same megabytes every time: whether that costs a thousand faults
or none depended on what the process had freed before.
"""

from __future__ import annotations

import torch

_LARGEST = 31 << 20
"""Just below the size beyond which glibc draws no conclusion."""


def keep_for_next_step() -> None:
    """Have it seen a large block come back. No page of it is touched; settings of the user's (``MALLOC_...``) hold."""
    torch.empty(_LARGEST, dtype=torch.uint8)
