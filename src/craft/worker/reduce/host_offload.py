"""Hold sent gradients in host memory until the step is committed.

Input: the buckets of a worker's blocks, as they are sent. Output: the same bits on the device, if the step is retried. The
exchange may then write its result over the sent data. Copies use a separate stream, into pinned memory that is reused from step
to step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

import torch

from craft.decide.step.tree import Node


class HostOffload:
    """Copies of sent buckets. One sending thread at a time puts them; the main thread takes them back."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._copies: dict[tuple[Node, int], torch.Tensor] = {}
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        """Pinned memory, by bucket."""

    def put(
        self, bucket: int, blocks: Mapping[Node, torch.Tensor], follow: Callable[[torch.cuda.Stream], None]
    ) -> torch.cuda.Event:
        """Copy a bucket of each block; return the event behind the copies. ``follow`` makes a stream wait for the bucket.

        It does not wait for the exchange: a copy ends, whatever happens to the other members.
        """
        follow(self._stream)
        with torch.cuda.stream(self._stream):
            for node, flat in blocks.items():
                self._room(node, bucket, flat).copy_(flat, non_blocking=True)
        mark = torch.cuda.Event()
        mark.record(self._stream)
        return mark

    def _room(self, node: Node, bucket: int, like: torch.Tensor) -> torch.Tensor:
        if (node, bucket) not in self._copies:
            free = self._free[bucket]
            self._copies[node, bucket] = (
                free.pop() if free else torch.empty(like.numel(), dtype=like.dtype, pin_memory=True)
            )
        return self._copies[node, bucket]

    def back(self, node: Node, bucket: int, flat: torch.Tensor) -> torch.Tensor:
        """Return what ``flat`` held before it was sent, in new memory; ``flat`` itself if it was not sent."""
        copy = self._copies.get((node, bucket))
        if copy is None:
            return flat
        self._stream.synchronize()
        return copy.to(flat.device)

    def clear(self) -> None:
        """Release all copies for reuse."""
        for (_, bucket), copy in self._copies.items():
            self._free[bucket].append(copy)
        self._copies = {}
