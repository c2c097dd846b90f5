"""Flat tensors that hold the gradients of one tree node, or their mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from craft.snapshots.state.shards import is_sharded, placed
from craft.worker.reduce.buckets import BucketLayout


class Flats:
    """One flat tensor per bucket, with a view for each parameter."""

    def __init__(self, layout: BucketLayout, tensors: Sequence[torch.Tensor] | None = None) -> None:
        """``tensors``: existing tensors to use."""
        self.tensors = [bucket.empty() for bucket in layout.buckets] if tensors is None else list(tensors)
        self.views = [bucket.views(flat) for bucket, flat in zip(layout.buckets, self.tensors, strict=True)]


@torch.no_grad()
def hand_out(layout: BucketLayout, flats: Flats, present: bytes, scale: float) -> None:
    """Set each ``p.grad`` to a view of the result; None where no microbatch gave a gradient."""
    bits = int.from_bytes(present, "little")
    for bucket, flat, views in zip(layout.buckets, flats.tensors, flats.views, strict=True):
        if scale != 1.0:
            flat.mul_(scale)
        for index, param, view in zip(bucket.param_indices, bucket.params, views, strict=True):
            if not bits >> index & 1:
                param.grad = None
            else:
                param.grad = placed(view, param) if is_sharded(param) else view
