"""Gradients whose sums are known: for tests of how they travel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from craft.decide.step.gradient_memory import Hold
from craft.decide.step.plan import share_of
from craft.decide.step.tree import Node, cover, fold
from craft.worker.reduce.accumulator import GradientAccumulator
from craft.worker.reduce.buckets import BucketLayout
from craft.worker.reduce.flats import Flats


def no_buffers(_: tuple[int, ...]) -> torch.Tensor:
    """Memory for the buffers of a model that has none."""
    return torch.empty(0)


def layout_of(sizes: Sequence[int], bucket_bytes: int) -> BucketLayout:
    return BucketLayout([torch.nn.Parameter(torch.zeros(size)) for size in sizes], bucket_bytes)


def leaf(microbatch: int, bucket: int, numel: int) -> torch.Tensor:
    """A gradient that no sum of is exact."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * bucket + microbatch)) / 3


def node_of(node: Node, bucket: int, numel: int, size: int) -> torch.Tensor:
    leaves = {(each, each + 1): leaf(each, bucket, numel) for each in range(*node)}
    total = fold(leaves, size, torch.add)
    assert total is not None
    return total


def mean(owners: Sequence[int], bucket: int, numel: int) -> torch.Tensor:
    present = [microbatch for microbatch, owner in enumerate(owners) if owner >= 0]
    total = fold({(each, each + 1): leaf(each, bucket, numel) for each in present}, len(owners), torch.add)
    if total is None:
        return torch.zeros(numel)
    count = len(present)
    return total * (1.0 / count) if count & (count - 1) == 0 else total / count


def held(layout: BucketLayout, owners: Sequence[int], rank: int, hold: Hold = "device") -> GradientAccumulator:
    """What ``rank`` holds once it has computed its share."""
    gradients = GradientAccumulator(layout, hooked=False, hold=hold)
    for node in cover(share_of(owners, rank), len(owners)):
        flats = Flats(layout)
        for bucket, flat in enumerate(flats.tensors):
            flat.copy_(node_of(node, bucket, flat.numel(), len(owners)))
        gradients.nodes[node] = flats
    return gradients
