"""The route for several workers per host: within hosts first, then between them.

A bucket is divided into slices, and on every host one member collects each slice. In order, for every bucket:

1. each member sends its blocks of a slice to the collector on its host;
2. collectors sum blocks that form whole tree nodes, and send these to the collectors of the same slice on other hosts,
   to each the piece that its host sums;
3. each collector sums its piece along the tree, and sends the mean to the others;
4. collectors send the whole slice to the members of their host. This waits until the next bucket has reached its second
   part, so that no member idles for it.

Between two hosts with one tree node each there is a shorter way for as many bytes: pieces are whole slices, both sum
everything, and the third part is skipped. Every member follows the same order, and each part waits only for earlier ones, so
there is no deadlock. Words and acknowledgements are small and go directly between all pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from craft.decide.step.topology import HostTopology, both_sum
from craft.decide.step.tree import Node
from craft.groups.group import P2P, Pending
from craft.telemetry.fault_points import reach
from craft.worker.reduce.accumulator import GradientAccumulator
from craft.worker.reduce.buckets import Bucket, BucketLayout
from craft.worker.reduce.routes.flat import BUFFERS, FIRST_BUCKET, FlatRoute, sum_into

Move = tuple[torch.Tensor, int, int]
"""A tensor, its destination or source peer, and its tag."""


class _Slice(msgspec.Struct, frozen=True):
    """A slice of one bucket that this rank collects."""

    number: int
    whole: slice
    pieces: tuple[slice, ...]
    """By host: the piece that it sums."""
    blocks: dict[Node, torch.Tensor]
    """Blocks of the neighbours."""
    sums: dict[Node, torch.Tensor]
    """Memory for this host's nodes that are sums of several blocks."""
    nodes: dict[Node, torch.Tensor]
    """Nodes of other hosts, for this host's piece."""


class HierarchicalRoute(FlatRoute):
    """The route of one plan through one group, by the host topology ``spread``."""

    def __init__(
        self, group: P2P, layout: BucketLayout, owners: Sequence[int], word_bytes: int, spread: HostTopology
    ) -> None:
        self._spread = spread
        self._host = spread.host_of(group.rank)
        self._both_sum = both_sum(spread, owners)
        self._neighbours = [rank for rank in spread.ranks[self._host] if rank != group.rank]
        self._afar = [host for host in range(spread.num_hosts) if host != self._host]
        self._nodes = [spread.nodes(host, owners) for host in range(spread.num_hosts)]
        self._collected: list[list[_Slice]] = []
        self._elsewhere: list[list[tuple[int, slice, int]]] = []
        """By bucket: the slices that neighbours collect: number, slice, collector."""
        self._nodes_due: list[list[Pending]] = []
        self._pieces_due: list[list[Pending]] = []
        self._spread_up_to = 0
        """Buckets whose slices this rank has sent to its neighbours."""
        super().__init__(group, layout, owners, word_bytes)
        self._most_messages = 1 + max(self._most_blocks, *map(len, self._nodes))

    # Layout.

    def _lay_out(self) -> None:
        numbers = range(self._spread.num_slices)
        for bucket in self._layout.buckets:
            wholes = [(number, self._whole(bucket, number)) for number in numbers]
            filled = [(number, whole) for number, whole in wholes if not _empty(whole)]
            self._collected.append(
                [self._slice(bucket, number) for number, _ in filled if self._collector(number) == self._rank]
            )
            self._elsewhere.append(
                [
                    (number, whole, self._collector(number))
                    for number, whole in filled
                    if self._collector(number) != self._rank
                ]
            )

    def _collector(self, number: int, host: int | None = None) -> int:
        return self._spread.collector(number, self._host if host is None else host)

    def _pieces(self, bucket: Bucket, number: int) -> tuple[slice, ...]:
        hosts, slices = self._spread.num_hosts, self._spread.num_slices
        if self._both_sum:
            return (bucket.chunk(number, slices),) * hosts
        return tuple(bucket.chunk(number * hosts + host, slices * hosts) for host in range(hosts))

    def _whole(self, bucket: Bucket, number: int) -> slice:
        pieces = self._pieces(bucket, number)
        return slice(pieces[0].start, pieces[-1].stop)

    def _slice(self, bucket: Bucket, number: int) -> _Slice:
        whole, pieces = self._whole(bucket, number), self._pieces(bucket, number)
        blocks = {node for rank in self._spread.ranks[self._host] for node in self._blocks[rank]}

        def room(part: slice, nodes: Sequence[Node]) -> dict[Node, torch.Tensor]:
            return {node: self._room(bucket, part.stop - part.start) for node in nodes}

        return _Slice(
            number=number,
            whole=whole,
            pieces=pieces,
            blocks=room(whole, [node for peer in self._neighbours for node in self._blocks[peer]]),
            sums=room(whole, [node for node in self._nodes[self._host] if node not in blocks]),
            nodes=room(pieces[self._host], [node for host in self._afar for node in self._nodes[host]]),
        )

    def _room(self, bucket: Bucket, numel: int) -> torch.Tensor:
        """Allocate memory for part of a bucket, for the life of this route."""
        return torch.empty(numel, dtype=bucket.dtype, device=bucket.device)

    def _tag(self, bucket: int, number: int, position: int) -> int:
        """Return a slice message's tag: 0 is the result, others are blocks or nodes; each kind occurs once between two ranks."""
        return FIRST_BUCKET + (bucket * self._spread.num_slices + number) * self._most_messages + position

    # Messages, part by part. Between any two ranks, sends and receives are in the same order.

    def block_sends(self, bucket: int, gradients: GradientAccumulator) -> list[Move]:
        held = [gradients.find(node).tensors[bucket] for node in self._blocks[self._rank]]
        return [
            (flat[whole], collector, self._tag(bucket, number, position))
            for number, whole, collector in self._elsewhere[bucket]
            for position, flat in enumerate(held, 1)
        ]

    def block_receives(self, bucket: int) -> list[Move]:
        return [
            (part.blocks[node], peer, self._tag(bucket, part.number, position))
            for part in self._collected[bucket]
            for peer in self._neighbours
            for position, node in enumerate(self._blocks[peer], 1)
        ]

    def node_sends(self, bucket: int, held: Sequence[Mapping[Node, torch.Tensor]]) -> list[Move]:
        return [
            (nodes[node][_within(part.pieces[host], part.whole)], self._collector(part.number, host), tag)
            for part, nodes in zip(self._collected[bucket], held, strict=True)
            for host in self._afar
            if not _empty(part.pieces[host])
            for node, tag in self._tagged(bucket, part, self._host)
        ]

    def node_receives(self, bucket: int) -> list[Move]:
        return [
            (part.nodes[node], self._collector(part.number, host), tag)
            for part in self._collected[bucket]
            if not _empty(part.pieces[self._host])
            for host in self._afar
            for node, tag in self._tagged(bucket, part, host)
        ]

    def _tagged(self, bucket: int, part: _Slice, host: int) -> list[tuple[Node, int]]:
        """Return the nodes of a host, each with its tag."""
        return [(node, self._tag(bucket, part.number, position)) for position, node in enumerate(self._nodes[host], 1)]

    def piece_sends(self, bucket: int, result: torch.Tensor) -> list[Move]:
        return [
            (result[part.pieces[self._host]], self._collector(part.number, host), self._tag(bucket, part.number, 0))
            for part in self._collected[bucket]
            if not (self._both_sum or _empty(part.pieces[self._host]))
            for host in self._afar
        ]

    def piece_receives(self, bucket: int, result: torch.Tensor) -> list[Move]:
        return [
            (result[part.pieces[host]], self._collector(part.number, host), self._tag(bucket, part.number, 0))
            for part in self._collected[bucket]
            for host in self._afar
            if not (self._both_sum or _empty(part.pieces[host]))
        ]

    def slice_sends(self, bucket: int, result: torch.Tensor) -> list[Move]:
        return [
            (result[part.whole], peer, self._tag(bucket, part.number, 0))
            for part in self._collected[bucket]
            for peer in self._neighbours
        ]

    def slice_receives(self, bucket: int, result: torch.Tensor) -> list[Move]:
        return [
            (result[whole], collector, self._tag(bucket, number, 0))
            for number, whole, collector in self._elsewhere[bucket]
        ]

    # Order.

    def _post_blocks(self, group: P2P, result: Sequence[torch.Tensor]) -> None:
        buckets = range(len(self._layout.buckets))
        self._spread_up_to = 0
        self._blocks_due = [_posted(group, self.block_receives(bucket)) for bucket in buckets]
        self._nodes_due = [_posted(group, self.node_receives(bucket)) for bucket in buckets]
        self._pieces_due = [_posted(group, self.piece_receives(bucket, result[bucket])) for bucket in buckets]
        self._results_due = [
            due for bucket in buckets for due in _posted(group, self.slice_receives(bucket, result[bucket]))
        ]

    def _send_all(self, moves: Sequence[Move]) -> None:
        for tensor, peer, tag in moves:
            self._send(tensor, peer, tag)

    def send_blocks(self, bucket: int, gradients: GradientAccumulator) -> None:
        self._send_all(self.block_sends(bucket, gradients))

    def reduce(self, bucket: int, gradients: GradientAccumulator, result: Sequence[torch.Tensor]) -> None:
        self._await(self._blocks_due[bucket])
        held = self.sum_blocks(bucket, gradients)
        self._send_all(self.node_sends(bucket, held))
        self._spread_results(bucket, result)
        due = self._nodes_due[bucket]
        if bucket == len(self._nodes_due) - 1:
            # The words came right behind the last blocks: one wait for both.
            due, self._words_due = [*due, *self._words_due], []
        self._await(due)
        self.sum_nodes(bucket, held, result[bucket])

    def sum_blocks(self, bucket: int, gradients: GradientAccumulator) -> list[dict[Node, torch.Tensor]]:
        """Return this host's sums for each slice collected here, as the fewest nodes."""
        return [self._host_nodes(part, bucket, gradients) for part in self._collected[bucket]]

    def _host_nodes(self, part: _Slice, bucket: int, gradients: GradientAccumulator) -> dict[Node, torch.Tensor]:
        blocks = dict(part.blocks)
        for node in self._blocks[self._rank]:
            blocks[node] = gradients.find(node).tensors[bucket][part.whole]
        for (lo, hi), room in part.sums.items():
            inside = {node: tensor for node, tensor in blocks.items() if lo <= node[0] and node[1] <= hi}
            sum_into(room, inside, len(self.owners))
        blocks |= part.sums
        return {node: blocks[node] for node in self._nodes[self._host]}

    def sum_nodes(self, bucket: int, held: Sequence[Mapping[Node, torch.Tensor]], result: torch.Tensor) -> None:
        """Sum this host's pieces along the tree, from its members' nodes and those of other hosts."""
        for part, nodes in zip(self._collected[bucket], held, strict=True):
            piece = part.pieces[self._host]
            if not _empty(piece):
                own = {node: tensor[_within(piece, part.whole)] for node, tensor in nodes.items()}
                self._mean_into(result[piece], own | part.nodes)

    def send_result(self, bucket: int, result: Sequence[torch.Tensor], step: int) -> None:
        for tensor, peer, tag in self.piece_sends(bucket, result[bucket]):
            self._send(tensor, peer, tag)
            reach("result_part", step)
        if self._both_sum:
            self._spread_results(bucket + 1, result)
            reach("result_part", step)

    def _spread_results(self, end: int, result: Sequence[torch.Tensor]) -> None:
        """Send whole slices of the buckets before ``end`` to the neighbours."""
        for bucket in range(self._spread_up_to, end):
            self._await(self._pieces_due[bucket])
            self._send_all(self.slice_sends(bucket, result[bucket]))
        self._spread_up_to = max(self._spread_up_to, end)

    def wait_results(self, result: Sequence[torch.Tensor]) -> None:
        self._spread_results(len(self._layout.buckets), result)
        super().wait_results(result)

    def share_buffers(self, flat: torch.Tensor, source: int) -> None:
        """Send the module buffers from ``source`` to the first member of each other host, and on to its neighbours."""
        assert self._group is not None
        origin = self._spread.host_of(source)
        first = source if self._host == origin else self._spread.ranks[self._host][0]
        if self._rank != source:
            sender = first if self._rank != first else source
            self._group.recv(flat, sender, BUFFERS).wait()
        to = self._neighbours if self._rank == first else []
        if self._rank == source:
            to = [*to, *(self._spread.ranks[host][0] for host in self._afar)]
        for peer in to:
            self._send(flat, peer, BUFFERS)


def _posted(group: P2P, receives: Sequence[Move]) -> list[Pending]:
    return [group.recv(tensor, peer, tag) for tensor, peer, tag in receives]


def _within(piece: slice, whole: slice) -> slice:
    """Return a piece's position within its slice."""
    return slice(piece.start - whole.start, piece.stop - whole.start)


def _empty(part: slice) -> bool:
    return bool(part.stop <= part.start)
