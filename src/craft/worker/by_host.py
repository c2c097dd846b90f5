"""How the blocks of one plan travel where several workers share a host: within it first, then between hosts.

A bucket is cut into slices, and on every host one member collects each slice. In order, for every bucket:

1. each sends its blocks of a slice to the collector on its own host;
2. collectors sum what forms whole nodes of the tree, and send these to the collectors of the same slice on other hosts,
   to each the piece that is its host's;
3. each sums its piece along the tree, and sends the mean to the others;
4. collectors send the whole slice to the members of their host. This waits until the next bucket has come to its second
   part, so that nobody stands still for it.

Between two hosts of one node each there is a shorter way for as many bytes: pieces are whole slices, both sum
everything, and the third part falls away. Every member goes through the same order, and each part waits only for earlier
ones: nobody waits in a circle. Words and acknowledgements go straight from each to each: they are small.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from craft.decide.hosts import Spread, both_sum
from craft.decide.tree import Node
from craft.groups.group import Lines, Pending
from craft.worker.gradients import Gradients
from craft.worker.layout import Bucket, Layout
from craft.worker.points import reach
from craft.worker.route import BUFFERS, FIRST_BUCKET, Route, sum_into


class _Slice(msgspec.Struct, frozen=True):
    """A slice of one bucket that this rank collects."""

    number: int
    whole: slice
    pieces: tuple[slice, ...]
    """By hosts: what each sums."""
    blocks: dict[Node, torch.Tensor]
    """Blocks of the neighbours."""
    sums: dict[Node, torch.Tensor]
    """Room for those nodes of this host that are sums of several blocks."""
    nodes: dict[Node, torch.Tensor]
    """Nodes of other hosts, of this host's piece."""


class RouteByHost(Route):
    """The way of one plan through one group, by ``spread``."""

    def __init__(self, group: Lines, layout: Layout, owners: Sequence[int], word_bytes: int, spread: Spread) -> None:
        self._spread = spread
        self._host = spread.host_of(group.rank)
        self._both_sum = both_sum(spread, owners)
        self._neighbours = [rank for rank in spread.ranks[self._host] if rank != group.rank]
        self._afar = [host for host in range(spread.num_hosts) if host != self._host]
        self._nodes = [spread.nodes(host, owners) for host in range(spread.num_hosts)]
        self._collected: list[list[_Slice]] = []
        self._elsewhere: list[list[tuple[int, slice, int]]] = []
        """By buckets: the slices that neighbours collect, with their numbers, and who it is."""
        self._nodes_due: list[list[Pending]] = []
        self._pieces_due: list[list[Pending]] = []
        self._spread_up_to = 0
        """Buckets whose slices this rank has sent to its neighbours."""
        super().__init__(group, layout, owners, word_bytes)
        self._most_messages = 1 + max(self._most_blocks, *map(len, self._nodes))

    # Where everything lies.

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
            length = part.stop - part.start
            return {node: torch.empty(length, dtype=bucket.dtype, device=bucket.device) for node in nodes}

        return _Slice(
            number=number,
            whole=whole,
            pieces=pieces,
            blocks=room(whole, [node for peer in self._neighbours for node in self._blocks[peer]]),
            sums=room(whole, [node for node in self._nodes[self._host] if node not in blocks]),
            nodes=room(pieces[self._host], [node for host in self._afar for node in self._nodes[host]]),
        )

    def _tag(self, bucket: int, number: int, position: int) -> int:
        """Of a slice's message: 0 is the result, the others are blocks or nodes. Between two there is only one of a kind."""
        return FIRST_BUCKET + (bucket * self._spread.num_slices + number) * self._most_messages + position

    # What is received.

    def _post_blocks(self, group: Lines, result: Sequence[torch.Tensor]) -> None:
        self._blocks_due, self._nodes_due, self._pieces_due, self._results_due = [], [], [], []
        self._spread_up_to = 0
        for bucket, flat in enumerate(result):
            self._post_bucket(group, bucket, flat)

    def _post_bucket(self, group: Lines, bucket: int, result: torch.Tensor) -> None:
        blocks, nodes, pieces = [], [], []
        for part in self._collected[bucket]:
            for peer in self._neighbours:
                for position, node in enumerate(self._blocks[peer], 1):
                    blocks.append(group.recv(part.blocks[node], peer, self._tag(bucket, part.number, position)))
            for host in self._afar:
                peer = self._collector(part.number, host)
                if not _empty(part.pieces[self._host]):
                    for position, node in enumerate(self._nodes[host], 1):
                        nodes.append(group.recv(part.nodes[node], peer, self._tag(bucket, part.number, position)))
                if not self._both_sum and not _empty(part.pieces[host]):
                    pieces.append(group.recv(result[part.pieces[host]], peer, self._tag(bucket, part.number, 0)))
        self._blocks_due.append(blocks)
        self._nodes_due.append(nodes)
        self._pieces_due.append(pieces)
        for number, whole, collector in self._elsewhere[bucket]:
            self._results_due.append(group.recv(result[whole], collector, self._tag(bucket, number, 0)))

    # What is sent.

    def send_blocks(self, bucket: int, gradients: Gradients) -> None:
        for position, node in enumerate(self._blocks[self._rank], 1):
            flat = gradients.find(node).tensors[bucket]
            for number, whole, collector in self._elsewhere[bucket]:
                self._send(flat[whole], collector, self._tag(bucket, number, position))

    def reduce(self, bucket: int, gradients: Gradients, result: Sequence[torch.Tensor]) -> None:
        self._await(self._blocks_due[bucket])
        held = [self._host_nodes(part, bucket, gradients) for part in self._collected[bucket]]
        for part, nodes in zip(self._collected[bucket], held, strict=True):
            self._send_nodes(part, bucket, nodes)
        self._spread_results(bucket, result)
        due = self._nodes_due[bucket]
        if bucket == len(self._nodes_due) - 1:
            due, self._words_due = [*due, *self._words_due], []
        self._await(due)
        for part, nodes in zip(self._collected[bucket], held, strict=True):
            piece = part.pieces[self._host]
            if not _empty(piece):
                inner = slice(piece.start - part.whole.start, piece.stop - part.whole.start)
                own = {node: tensor[inner] for node, tensor in nodes.items()}
                self._mean_into(result[bucket][piece], own | part.nodes)

    def _host_nodes(self, part: _Slice, bucket: int, gradients: Gradients) -> dict[Node, torch.Tensor]:
        """What this host's members hold of a slice, as the fewest nodes."""
        blocks = dict(part.blocks)
        for node in self._blocks[self._rank]:
            blocks[node] = gradients.find(node).tensors[bucket][part.whole]
        for (lo, hi), room in part.sums.items():
            inside = {node: tensor for node, tensor in blocks.items() if lo <= node[0] and node[1] <= hi}
            sum_into(room, inside, len(self.owners))
        blocks |= part.sums
        return {node: blocks[node] for node in self._nodes[self._host]}

    def _send_nodes(self, part: _Slice, bucket: int, nodes: dict[Node, torch.Tensor]) -> None:
        for host in self._afar:
            piece, peer = part.pieces[host], self._collector(part.number, host)
            inner = slice(piece.start - part.whole.start, piece.stop - part.whole.start)
            if not _empty(piece):
                for position, node in enumerate(self._nodes[self._host], 1):
                    self._send(nodes[node][inner], peer, self._tag(bucket, part.number, position))

    def send_result(self, bucket: int, result: Sequence[torch.Tensor], step: int) -> None:
        if self._both_sum:
            self._spread_results(bucket + 1, result)
            reach("result_part", step)
            return
        for part in self._collected[bucket]:
            piece = part.pieces[self._host]
            for host in self._afar if not _empty(piece) else ():
                peer = self._collector(part.number, host)
                self._send(result[bucket][piece], peer, self._tag(bucket, part.number, 0))
                reach("result_part", step)

    def _spread_results(self, end: int, result: Sequence[torch.Tensor]) -> None:
        """Send whole slices of the buckets before ``end`` to the neighbours."""
        for bucket in range(self._spread_up_to, end):
            self._await(self._pieces_due[bucket])
            for part in self._collected[bucket]:
                for peer in self._neighbours:
                    self._send(result[bucket][part.whole], peer, self._tag(bucket, part.number, 0))
        self._spread_up_to = max(self._spread_up_to, end)

    def wait_results(self, result: Sequence[torch.Tensor]) -> None:
        self._spread_results(len(self._layout.buckets), result)
        super().wait_results(result)

    def share_buffers(self, flat: torch.Tensor, source: int) -> None:
        """Bring the module buffers from ``source`` to the first member of each other host, and on to its neighbours."""
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


def _empty(part: slice) -> bool:
    return bool(part.stop <= part.start)
