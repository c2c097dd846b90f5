"""The route of gradients on a device: by NCCL between devices, or by Gloo through host memory.

Same plan, same tree, same bits as ``flat.py``, which does the rest: words, module buffers and acknowledgements go by Gloo.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Any

import torch

from craft.decide.step.tree import Node
from craft.groups.group import P2P, DeviceP2P
from craft.worker.reduce.accumulator import GradientAccumulator
from craft.worker.reduce.buckets import BucketLayout
from craft.worker.reduce.routes.flat import FlatRoute

_BUCKETS_AHEAD = 2
"""Most buckets that the device may lag behind the host; otherwise NCCL would block the host where no abort can free it.

A joiner, which has no blocks, waits for each bucket: the driver loads a kernel at its first use only once the device has finished
all its work.
"""


def device_route(group: P2P | None, layout: BucketLayout, owners: Sequence[int], word_bytes: int) -> FlatRoute:
    """Return the route that the group supports."""
    if group is None or isinstance(group, DeviceP2P):
        return FlatCudaRoute(group, layout, owners, word_bytes)
    return HostRoute(group, layout, owners, word_bytes)


class Streamed(FlatRoute):
    """Tracks when a bucket may be read: the device may still fill it when the host is done."""

    def __init__(
        self, group: P2P | None, layout: BucketLayout, owners: Sequence[int], word_bytes: int, *more: Any
    ) -> None:
        """``more`` is for the next class in the method resolution order."""
        self._stream = group.stream if isinstance(group, DeviceP2P) else torch.cuda.Stream(layout.buckets[0].device)
        self._filled: dict[int, torch.cuda.Event] = {}
        self._set_aside: dict[int, torch.cuda.Event] = {}
        self._marks: deque[torch.cuda.Event] = deque()
        super().__init__(group, layout, owners, word_bytes, *more)

    def begin(self) -> None:
        super().begin()
        self._filled, self._set_aside = {}, {}
        self._marks.clear()

    def post(self, result: Sequence[torch.Tensor]) -> None:
        for flat in result:
            # No other code may get its memory while an aborted stream still writes there.
            if flat.is_cuda:
                flat.record_stream(self._stream)
        super().post(result)

    def flushed(self, bucket: int) -> None:
        event = torch.cuda.Event()
        event.record()
        self._filled[bucket] = event

    def _follow(self, bucket: int, stream: torch.cuda.Stream | None = None) -> None:
        """Make a stream wait until the bucket is filled; without an event, this thread's current stream fills it."""
        stream = self._stream if stream is None else stream
        event = self._filled.get(bucket)
        if event is not None:
            stream.wait_event(event)
        else:
            stream.wait_stream(torch.cuda.current_stream(stream.device))

    def _put_aside(self, bucket: int, gradients: GradientAccumulator) -> None:
        """Copy a bucket to host memory before it is sent, if it is held there."""
        if gradients.aside is not None:
            blocks = {node: gradients.find(node).tensors[bucket] for node in self._blocks[self._rank]}
            self._set_aside[bucket] = gradients.aside.put(bucket, blocks, lambda stream: self._follow(bucket, stream))

    def _may_overwrite(self, bucket: int) -> None:
        """Make the route's stream wait until the sent data is no longer needed."""
        event = self._set_aside.get(bucket)
        if event is not None:
            self._stream.wait_event(event)

    def _stay_near(self, nccl: DeviceP2P) -> None:
        """Wait for an earlier bucket if the device lags too far behind."""
        self._marks.append(nccl.mark())
        if len(self._marks) > (_BUCKETS_AHEAD if self._blocks[self._rank] else 0):
            nccl.wait_device(self._marks.popleft())

    def _await_device(self, nccl: DeviceP2P | None) -> None:
        """Wait until the stream has finished all its work."""
        began = monotonic()
        if nccl is not None:
            nccl.wait_device(nccl.mark())
        else:
            self._stream.synchronize()
        self.waited_s += monotonic() - began


class FlatCudaRoute(Streamed):
    """Everything on the group's stream, in bucket order: all members make the same calls in the same order."""

    def __init__(self, group: DeviceP2P | None, layout: BucketLayout, owners: Sequence[int], word_bytes: int) -> None:
        self._nccl = group
        super().__init__(group, layout, owners, word_bytes)
        self._room = self._make_room()

    def _buffers(self, bucket: int) -> dict[Node, torch.Tensor]:
        # All buckets share one receive buffer: on one stream a bucket is summed before the next one arrives.
        return {}

    def _make_room(self) -> torch.Tensor:
        num_nodes = sum(len(self._blocks[peer]) for peer in self._peers)
        chunks = [chunks[self._rank] for chunks in self._chunks]
        sizes = [
            num_nodes * padded((chunk.stop - chunk.start) * bucket.dtype.itemsize)
            for chunk, bucket in zip(chunks, self._layout.buckets, strict=True)
        ]
        with torch.cuda.stream(self._stream):
            return torch.empty(max(sizes, default=0), dtype=torch.uint8, device=self._stream.device)

    def _inbox_of(self, bucket: int) -> dict[Node, torch.Tensor]:
        chunk, dtype = self._chunks[bucket][self._rank], self._layout.buckets[bucket].dtype
        size = (chunk.stop - chunk.start) * dtype.itemsize
        nodes = [node for peer in self._peers for node in self._blocks[peer]]
        return {
            node: self._room[number * padded(size) : number * padded(size) + size].view(dtype)
            for number, node in enumerate(nodes)
        }

    def _post_blocks(self, group: P2P, result: Sequence[torch.Tensor]) -> None:
        """Post nothing: the shared buffer receives on the stream."""

    def send_blocks(self, bucket: int, gradients: GradientAccumulator) -> None:
        self._put_aside(bucket, gradients)
        self._follow(bucket)
        if self._nccl is None:
            return
        sends = [
            (gradients.find(node).tensors[bucket][chunk], peer)
            for node in self._blocks[self._rank]
            for peer in self._peers
            if (chunk := self._chunks[bucket][peer]).stop > chunk.start
        ]
        inbox = self._inbox_of(bucket)
        receives = [(inbox[node], peer) for peer in self._peers for node in self._blocks[peer] if inbox[node].numel()]
        self._nccl.swap(sends, receives)

    def reduce(self, bucket: int, gradients: GradientAccumulator, result: Sequence[torch.Tensor]) -> None:
        self._may_overwrite(bucket)
        with torch.cuda.stream(self._stream):
            self._mean(bucket, gradients, result, self._inbox_of(bucket))

    def send_result(self, bucket: int, result: Sequence[torch.Tensor], step: int) -> None:
        if self._nccl is None:
            return
        if not self._sums_all:
            chunks = self._chunks[bucket]
            own = result[bucket][chunks[self._rank]]
            sends = [(own, peer) for peer in self._peers if own.numel()]
            receives = [
                (result[bucket][chunks[peer]], peer) for peer in self._peers if chunks[peer].stop > chunks[peer].start
            ]
            self._nccl.swap(sends, receives)
        self._stay_near(self._nccl)

    def wait_results(self, result: Sequence[torch.Tensor]) -> None:
        self._await_device(self._nccl)


class HostRoute(Streamed):
    """Copies blocks into host memory, sends and sums them there, and copies the result back."""

    def __init__(self, group: P2P | None, layout: BucketLayout, owners: Sequence[int], word_bytes: int) -> None:
        super().__init__(group, layout, owners, word_bytes)
        self._copies: dict[tuple[int, Node], torch.Tensor] = {}
        self._results = [_pinned(bucket.numel, bucket.dtype) for bucket in layout.buckets]

    def _buffers(self, bucket: int) -> dict[Node, torch.Tensor]:
        chunk, dtype = self._chunks[bucket][self._rank], self._layout.buckets[bucket].dtype
        nodes = [node for peer in self._peers for node in self._blocks[peer]]
        return {node: _pinned(chunk.stop - chunk.start, dtype) for node in nodes}

    def post(self, result: Sequence[torch.Tensor]) -> None:
        super().post(self._results)

    def send_blocks(self, bucket: int, gradients: GradientAccumulator) -> None:
        self._put_aside(bucket, gradients)
        self._follow(bucket)
        with torch.cuda.stream(self._stream):
            for node in self._blocks[self._rank]:
                flat = gradients.find(node).tensors[bucket]
                if (bucket, node) not in self._copies:
                    self._copies[bucket, node] = _pinned(flat.numel(), flat.dtype)
                self._copies[bucket, node].copy_(flat, non_blocking=True)
        # This stream waits only for local work: it ends, whatever happens to the other members.
        self._stream.synchronize()
        super().send_blocks(bucket, gradients)

    def _block(self, bucket: int, node: Node, gradients: GradientAccumulator) -> torch.Tensor:
        return self._copies[bucket, node]

    def reduce(self, bucket: int, gradients: GradientAccumulator, result: Sequence[torch.Tensor]) -> None:
        super().reduce(bucket, gradients, self._results)

    def send_result(self, bucket: int, result: Sequence[torch.Tensor], step: int) -> None:
        super().send_result(bucket, self._results, step)

    def wait_results(self, result: Sequence[torch.Tensor]) -> None:
        super().wait_results(self._results)
        with torch.cuda.stream(self._stream):
            for bucket, (flat, found) in enumerate(zip(result, self._results, strict=True)):
                self._may_overwrite(bucket)
                flat.copy_(found, non_blocking=True)
        self._stream.synchronize()


def padded(size: int) -> int:
    """Round up, so that every part of the shared buffer is as well aligned as a separate allocation."""
    return size + -size % 512


def _pinned(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, pin_memory=True)
