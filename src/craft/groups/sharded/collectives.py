"""Collectives that move tensors without computing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from craft.groups.group import P2P
from craft.groups.sharded.transfer import copy, echo, exchange, flat, others


class AllGather:
    """Every member receives what each one sends."""

    name = "all_gather"

    def __init__(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, rank: int) -> None:
        """Take one output per member."""
        self.outputs = outputs
        self._tensor = tensor
        self._rank = rank

    def live(self, peers: P2P) -> None:
        exchange(
            peers,
            [(self._tensor, peer) for peer in others(peers)],
            [(self.outputs[peer], peer) for peer in others(peers)],
        )
        copy(self.outputs[self._rank], self._tensor)

    def echo(self) -> None:
        for output in self.outputs:
            echo(output, self._tensor)


class AllGatherSingle:
    """Every member receives what each one sends, in one tensor."""

    name = "all_gather"

    def __init__(self, output: torch.Tensor, tensor: torch.Tensor, rank: int, size: int) -> None:
        self.outputs = (output,)
        self._tensor = tensor
        self._rank = rank
        self._size = size

    def live(self, peers: P2P) -> None:
        with flat(self.outputs[0]) as output:
            AllGather(output.tensor_split(self._size), self._tensor, self._rank).live(peers)

    def echo(self) -> None:
        with flat(self.outputs[0]) as output:
            AllGather(output.tensor_split(self._size), self._tensor, self._rank).echo()


class Broadcast:
    """Every member receives what the root has."""

    name = "broadcast"

    def __init__(self, tensor: torch.Tensor, root: int, rank: int) -> None:
        self.outputs = () if rank == root else (tensor,)
        self._tensor = tensor
        self._root = root

    def live(self, peers: P2P) -> None:
        if self.outputs:
            exchange(peers, (), [(self._tensor, self._root)])
        else:
            exchange(peers, [(self._tensor, peer) for peer in others(peers)], ())

    def echo(self) -> None:
        for output in self.outputs:
            output.zero_()


class Gather:
    """The root receives what each member sends."""

    name = "gather"

    def __init__(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> None:
        """Take one output per member at the root, and none elsewhere."""
        self.outputs = outputs
        self._tensor = tensor
        self._root = root

    def live(self, peers: P2P) -> None:
        if peers.rank != self._root:
            exchange(peers, [(self._tensor, self._root)], ())
            return
        exchange(peers, (), [(self.outputs[peer], peer) for peer in others(peers)])
        copy(self.outputs[self._root], self._tensor)

    def echo(self) -> None:
        for output in self.outputs:
            echo(output, self._tensor)


class Scatter:
    """Each member receives one of the root's tensors."""

    name = "scatter"

    def __init__(self, output: torch.Tensor, tensors: Sequence[torch.Tensor], root: int) -> None:
        """Take one tensor per member at the root, and none elsewhere."""
        self.outputs = (output,)
        self._tensors = tensors
        self._root = root

    def live(self, peers: P2P) -> None:
        if peers.rank != self._root:
            exchange(peers, (), [(self.outputs[0], self._root)])
            return
        exchange(peers, [(self._tensors[peer], peer) for peer in others(peers)], ())
        self.echo()

    def echo(self) -> None:
        if self._tensors:
            copy(self.outputs[0], self._tensors[self._root])
        else:
            self.outputs[0].zero_()


class AllToAll:
    """Each member sends one tensor to each."""

    name = "all_to_all"

    def __init__(self, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], rank: int) -> None:
        self.outputs = outputs
        self._tensors = tensors
        self._rank = rank

    def live(self, peers: P2P) -> None:
        exchange(
            peers,
            [(self._tensors[peer], peer) for peer in others(peers)],
            [(self.outputs[peer], peer) for peer in others(peers)],
        )
        copy(self.outputs[self._rank], self._tensors[self._rank])

    def echo(self) -> None:
        for output in self.outputs:
            echo(output, self._tensors[self._rank])


class AllToAllSingle:
    """Each member sends some rows of one tensor to each."""

    name = "all_to_all"

    def __init__(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int], rank: int
    ) -> None:
        """Take the numbers of rows per member."""
        self.outputs = (output,)
        rows = (output.split(list(received)), tensor.split(list(sent)))
        self._parts = AllToAll(rows[0], rows[1], rank)

    def live(self, peers: P2P) -> None:
        self._parts.live(peers)

    def echo(self) -> None:
        self._parts.echo()


class Barrier:
    """No member returns before all have called it."""

    name = "barrier"
    outputs = ()

    def live(self, peers: P2P) -> None:
        token = torch.ones(1, dtype=torch.uint8)
        arrived = [(torch.empty_like(token), peer) for peer in others(peers)]
        exchange(peers, [(token, peer) for peer in others(peers)], arrived)

    def echo(self) -> None:
        """Nothing is received."""
