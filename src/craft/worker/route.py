"""How the blocks of one plan travel: who sends which tree node to whom, and into which buffers it is received.

Flat: rank j owns chunk j of every bucket, receives all blocks of it, sums them along the tree, and sends the sum to all.
The buffers live as long as the plan does, which in steady state is as long as the generation.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from craft.decide.plan import share_of
from craft.decide.tree import Node, cover, fold
from craft.groups.group import Group, Pending
from craft.protocol.errors import GroupError
from craft.worker.gradients import Gradients
from craft.worker.layout import Layout

logger = logging.getLogger(__name__)

_RESULT, _BUFFERS = 0, 1
_FIRST_BLOCK = 2


class Route:
    """The way of one plan through one group. A group of one needs no connections: ``group`` is None then."""

    def __init__(self, group: Group | None, layout: Layout, owners: Sequence[int]) -> None:
        self._group = group
        self._layout = layout
        self.owners = tuple(owners)
        self._size = group.size if group is not None else 1
        self._rank = group.rank if group is not None else 0
        self._peers = [rank for rank in range(self._size) if rank != self._rank]
        self._blocks = {rank: cover(share_of(owners, rank), len(owners)) for rank in range(self._size)}
        self._most_blocks = max((len(blocks) for blocks in self._blocks.values()), default=0)
        self._chunks = [[bucket.chunk(rank, self._size) for rank in range(self._size)] for bucket in layout.buckets]
        self._num_present = sum(1 for owner in owners if owner >= 0)
        self._inbox = [self._buffers(bucket) for bucket in range(len(layout.buckets))]
        self._sent: list[Pending] = []
        self._blocks_due: list[list[Pending]] = []
        self._results_due: list[Pending] = []

    def _buffers(self, bucket: int) -> dict[Node, torch.Tensor]:
        chunk = self._chunks[bucket][self._rank]
        spec = self._layout.buckets[bucket]
        return {
            node: torch.empty(chunk.stop - chunk.start, dtype=spec.dtype, device=spec.device)
            for peer in self._peers
            for node in self._blocks[peer]
        }

    def _tag(self, bucket: int, what: int) -> int:
        return bucket * (_FIRST_BLOCK + self._most_blocks) + what

    def post(self, result: Sequence[torch.Tensor]) -> None:
        """Post every receive of the step, before anything is sent: what arrives early goes straight to its place."""
        self._sent, self._blocks_due, self._results_due = [], [], []
        group = self._group
        if group is None:
            return
        for bucket, chunks in enumerate(self._chunks):
            inbox = self._inbox[bucket]
            self._blocks_due.append(
                [
                    group.recv(inbox[node], peer, self._tag(bucket, _FIRST_BLOCK + position))
                    for peer in self._peers
                    for position, node in enumerate(self._blocks[peer])
                    if inbox[node].numel()
                ]
            )
            self._results_due += [
                group.recv(result[bucket][chunks[peer]], peer, self._tag(bucket, _RESULT))
                for peer in self._peers
                if chunks[peer].stop > chunks[peer].start
            ]

    def send_blocks(self, bucket: int, gradients: Gradients) -> None:
        """Send this rank's blocks of a bucket to the owners of its chunks."""
        for position, node in enumerate(self._blocks[self._rank]):
            flat = gradients.find(node).tensors[bucket]
            for peer in self._peers:
                chunk = self._chunks[bucket][peer]
                if chunk.stop > chunk.start:
                    self._send(flat[chunk], peer, self._tag(bucket, _FIRST_BLOCK + position))

    def reduce(self, bucket: int, gradients: Gradients, result: Sequence[torch.Tensor]) -> None:
        """Sum this rank's chunk along the tree and divide it by the number of microbatches."""
        if self._group is not None:
            for due in self._blocks_due[bucket]:
                due.wait()
        chunk = self._chunks[bucket][self._rank]
        out = result[bucket][chunk]
        if not out.numel():
            return
        parts = dict(self._inbox[bucket])
        for node in self._blocks[self._rank]:
            parts[node] = gradients.find(node).tensors[bucket][chunk]
        total = _sum_into(out, parts, len(self.owners))
        if self._num_present > 1:
            total.div_(self._num_present)

    def send_result(self, bucket: int, result: Sequence[torch.Tensor]) -> None:
        """Send the sum of this rank's chunk to all."""
        chunk = self._chunks[bucket][self._rank]
        if chunk.stop > chunk.start:
            for peer in self._peers:
                self._send(result[bucket][chunk], peer, self._tag(bucket, _RESULT))

    def share_buffers(self, flat: torch.Tensor, source: int) -> None:
        """Bring the module buffers from ``source`` to everybody."""
        assert self._group is not None
        tag = self._tag(len(self._layout.buckets), _BUFFERS)
        if self._rank == source:
            for peer in self._peers:
                self._send(flat, peer, tag)
        else:
            self._group.recv(flat, source, tag).wait()

    def wait_results(self) -> None:
        for due in self._results_due:
            due.wait()

    def drain(self) -> None:
        """Wait for every operation, until it is done or has failed: only then are its buffers nobody's but ours."""
        pending = [*self._sent, *self._results_due, *(due for bucket in self._blocks_due for due in bucket)]
        self._sent, self._results_due, self._blocks_due = [], [], []
        for each in pending:
            try:
                each.wait()
            except GroupError as error:
                logger.debug("ended with: %s", error)

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        assert self._group is not None
        self._sent.append(self._group.send(tensor, peer, tag))


def _sum_into(out: torch.Tensor, parts: dict[Node, torch.Tensor], num_microbatches: int) -> torch.Tensor:
    """Sum ``parts`` along the tree into ``out``. Inputs are never overwritten: only ``out`` and fresh temporaries are."""
    own: set[int] = set()
    free = [out]

    def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if id(left) in own:
            target = left
        elif id(right) in own:
            target = right
        else:
            target = free.pop() if free else torch.empty_like(out)
            own.add(id(target))
        return torch.add(left, right, out=target)

    total = fold(parts, num_microbatches, add)
    if total is None:
        return out.zero_()
    if total is not out:
        out.copy_(total)
    return out
