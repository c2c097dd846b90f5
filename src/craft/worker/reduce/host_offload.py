"""Held gradients in the memory of the host: copies of what a worker sends, from when it is sent until the step is committed.

Enters: the buckets of its blocks, as they are sent. Leaves: the same bits on the device, if the step has to be taken up again.
The exchange then may write its result over what was sent. Copies go by a stream of their own, into pinned memory that stays
from step to step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

import torch

from craft.decide.step.tree import Node


class HostOffload:
    """Whoever sends puts buckets here, one thread at a time; the main thread takes them back."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._copies: dict[tuple[Node, int], torch.Tensor] = {}
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        """Pinned memory, by buckets."""

    def put(
        self, bucket: int, blocks: Mapping[Node, torch.Tensor], follow: Callable[[torch.cuda.Stream], None]
    ) -> torch.cuda.Event:
        """Copy a bucket of each block; returns the mark behind that. ``follow`` lets a stream wait until it is filled.

        It waits for nothing of the exchange: a copy ends, whatever becomes of the others.
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
        """What ``flat`` held before it was sent, in memory of its own; ``flat`` itself if it was not."""
        copy = self._copies.get((node, bucket))
        if copy is None:
            return flat
        self._stream.synchronize()
        return copy.to(flat.device)

    def clear(self) -> None:
        """Nothing need be held any longer."""
        for (_, bucket), copy in self._copies.items():
            self._free[bucket].append(copy)
        self._copies = {}
