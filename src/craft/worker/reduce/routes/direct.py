"""The route of two members by their direct connection: the shortest way for what both wait for at the end of a step.

One message carries the blocks of the last bucket and the control word, another one the acknowledgement. Buckets before the last
travel through Gloo while backward goes on, and so do large blocks of the last one: Gloo sends and receives on two threads at the
same time. What is summed, and in which order, is the flat route's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

import torch

from craft.groups.direct import DirectConnection
from craft.groups.group import P2P
from craft.worker.reduce.accumulator import GradientAccumulator
from craft.worker.reduce.buckets import BucketLayout
from craft.worker.reduce.routes.flat import FlatRoute

_BLOCKS_AND_WORD, _ACKNOWLEDGEMENT = 1, 2
"""Kinds of messages."""
_LARGE_BYTES = 2 << 20
"""Above this, Gloo is faster."""


class DirectRoute(FlatRoute):
    """The route of one plan through a group of two that has a direct connection."""

    def __init__(self, group: P2P, connection: DirectConnection, layout: BucketLayout, owners: Sequence[int]) -> None:
        # Words need no frames of a fixed size: a message says how long its word is.
        super().__init__(group, layout, owners, word_bytes=0)
        self._connection = connection
        self._num_by_gloo = len(layout.buckets)
        """Buckets that travel through Gloo; the same on both members."""
        self._to_send: list[memoryview] = []
        """Blocks that are sent with the word."""
        self._to_fill: list[memoryview] = []
        self._peer_word: bytes | None = None
        if layout.buckets:
            last = layout.buckets[-1]
            if self._most_blocks * last.numel * last.dtype.itemsize <= _LARGE_BYTES:
                self._num_by_gloo -= 1
                self._to_fill = [_bytes_of(block) for block in self._inbox[-1].values()]

    def begin(self) -> None:
        super().begin()
        self._to_send, self._peer_word = [], None

    def post(self, result: Sequence[torch.Tensor]) -> None:
        assert self._group is not None
        self._blocks_due = [self._recv_blocks(self._group, bucket) for bucket in range(self._num_by_gloo)]

    def send_blocks(self, bucket: int, gradients: GradientAccumulator) -> None:
        if bucket < self._num_by_gloo:
            super().send_blocks(bucket, gradients)
        else:
            blocks = self._blocks[self._rank]
            self._to_send = [_bytes_of(self._block(bucket, node, gradients)) for node in blocks]

    def send_word(self, data: bytes) -> None:
        self._connection.send(_BLOCKS_AND_WORD, self._to_send, data)

    def reduce(self, bucket: int, gradients: GradientAccumulator, result: Sequence[torch.Tensor]) -> None:
        if bucket < self._num_by_gloo:
            self._await(self._blocks_due[bucket])
        else:
            self._receive()
        self._mean(bucket, gradients, result, self._inbox[bucket])

    def _receive(self) -> None:
        began = monotonic()
        self._peer_word = bytes(self._connection.receive(_BLOCKS_AND_WORD, self._to_fill))
        self.waited_s += monotonic() - began

    def words(self, own: bytes) -> list[bytes]:
        if self._peer_word is None:
            # It came without blocks.
            self._receive()
        assert self._peer_word is not None
        return [own, self._peer_word] if self._rank == 0 else [self._peer_word, own]

    def acknowledge(self, sent_first: Callable[[], None]) -> None:
        self._connection.send(_ACKNOWLEDGEMENT)
        sent_first()
        self._connection.receive(_ACKNOWLEDGEMENT)
        assert self._group is not None
        # The peer has acknowledged, so all sends have arrived: this only completes them.
        self._group.wait_all(self._sent)
        self._sent = []


def _bytes_of(flat: torch.Tensor) -> memoryview:
    """Return a flat tensor's memory."""
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
