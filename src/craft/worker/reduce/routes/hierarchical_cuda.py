"""The hierarchical route between devices: the parts of ``hierarchical.py`` by NCCL, on the group's stream.

NCCL's messages have no tags: ``hierarchical.py`` lists them in the same order on both sides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from craft.decide.step.topology import HostTopology
from craft.groups.group import P2P, DeviceP2P
from craft.worker.reduce.accumulator import GradientAccumulator
from craft.worker.reduce.buckets import Bucket, BucketLayout
from craft.worker.reduce.routes.flat_cuda import Streamed, padded
from craft.worker.reduce.routes.hierarchical import HierarchicalRoute, Move


class HierarchicalCudaRoute(Streamed, HierarchicalRoute):
    """All buckets share one receive buffer: on one stream a bucket is summed before the next one arrives."""

    def __init__(
        self, group: DeviceP2P, layout: BucketLayout, owners: Sequence[int], word_bytes: int, spread: HostTopology
    ) -> None:
        self._nccl = group
        self._shared: torch.Tensor | None = None
        self._taken: Counter[int] = Counter()
        """By bucket: the bytes allotted to it."""
        super().__init__(group, layout, owners, word_bytes, spread)

    def _lay_out(self) -> None:
        # Once to measure the memory, and once for good.
        super()._lay_out()
        # Received data is written and read on this stream alone.
        with torch.cuda.stream(self._stream):
            self._shared = torch.empty(
                max(self._taken.values(), default=0), dtype=torch.uint8, device=self._nccl.device
            )
        self._collected, self._elsewhere = [], []
        self._taken.clear()
        super()._lay_out()

    def _room(self, bucket: Bucket, numel: int) -> torch.Tensor:
        begin, size = self._taken[bucket.index], numel * bucket.dtype.itemsize
        self._taken[bucket.index] += padded(size)
        if self._shared is None:
            return torch.empty(numel, dtype=bucket.dtype, device="meta")
        return self._shared[begin : begin + size].view(bucket.dtype)

    def _post_blocks(self, group: P2P, result: Sequence[torch.Tensor]) -> None:
        """Post nothing: the shared buffer receives on the stream."""

    def _swap(self, sends: Sequence[Move], receives: Sequence[Move]) -> None:
        if sends or receives:
            self._nccl.swap([move[:2] for move in sends], [move[:2] for move in receives])

    def send_blocks(self, bucket: int, gradients: GradientAccumulator) -> None:
        self._put_aside(bucket, gradients)
        self._follow(bucket)
        self._swap(self.block_sends(bucket, gradients), self.block_receives(bucket))

    def reduce(self, bucket: int, gradients: GradientAccumulator, result: Sequence[torch.Tensor]) -> None:
        with torch.cuda.stream(self._stream):
            held = self.sum_blocks(bucket, gradients)
            self._swap(self.node_sends(bucket, held), self.node_receives(bucket))
            self._may_overwrite(bucket)
            self.sum_nodes(bucket, held, result[bucket])

    def send_result(self, bucket: int, result: Sequence[torch.Tensor], step: int) -> None:
        flat = result[bucket]
        self._swap(self.piece_sends(bucket, flat), self.piece_receives(bucket, flat))
        self._swap(self.slice_sends(bucket, flat), self.slice_receives(bucket, flat))
        self._stay_near(self._nccl)

    def wait_results(self, result: Sequence[torch.Tensor]) -> None:
        self._await_device(self._nccl)
