"""Messages between the members of a process group: all receives are posted first, then all sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from craft.groups.group import P2P, Pending, Transfers
from craft.groups.subgroup import DeviceSubgroup, DirectSubgroup


class Posted:
    """Messages under way."""

    def __init__(self, peers: P2P, sends: Transfers, receives: Transfers, tag: int, *, in_order: bool = True) -> None:
        """``in_order``: all members post at the same point of their order; if not, tensors go through host memory.

        NCCL's messages have no tags, and wait for each other in the order in which they are enqueued.
        """
        self.generation = peers.generation
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._pending: list[Pending] = []
        self._mark: Any = None
        sends = [(tensor, peer) for tensor, peer in sends if tensor.numel()]
        receives = [(tensor, peer) for tensor, peer in receives if tensor.numel()]
        on_device = [tensor for tensor, _ in (*sends, *receives) if tensor.is_cuda]
        if on_device and in_order and isinstance(peers, DeviceSubgroup):
            self._swap(peers, sends, receives)
            return
        self._pending = [peers.recv(self._landing(tensor, "cpu"), peer, tag) for tensor, peer in receives]
        self._pending += [peers.send(tensor.cpu().contiguous(), peer, tag) for tensor, peer in sends]

    def _swap(self, peers: DeviceSubgroup, sends: Transfers, receives: Transfers) -> None:
        ready = [(tensor.contiguous(), peer) for tensor, peer in sends]
        landings = [(self._landing(tensor, tensor.device), peer) for tensor, peer in receives]
        for landing, _ in landings:
            if not landing.is_floating_point():
                # An abort lets the stream go on with what is here: kernels that use it as an index must find a valid one.
                landing.zero_()
        peers.stream.wait_stream(torch.cuda.current_stream(peers.device))
        peers.swap(ready, landings)
        self._mark = peers.mark()

    def _landing(self, tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
        """Return the memory to receive ``tensor`` into: its own if it is contiguous and there."""
        if tensor.is_contiguous() and tensor.device == torch.device(device):
            return tensor
        landing = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        self._late.append((tensor, landing))
        return landing

    def finish(self, peers: P2P) -> None:
        """Wait until all are sent and received, for tensors on a device as ``peers`` does; raise GroupError on a break."""
        peers.wait_all(self._pending)
        if self._mark is not None:
            assert isinstance(peers, DeviceSubgroup)
            peers.wait_device(self._mark)
        for tensor, landing in self._late:
            tensor.copy_(landing)


def exchange(peers: P2P, sends: Transfers, receives: Transfers, tag: int = 0) -> None:
    """Send and receive; each pair of members must list the messages between them in the same order."""
    if isinstance(peers, DirectSubgroup) and len(sends) == len(receives) == 1:
        _swap_directly(peers, sends[0][0], receives[0][0], tag)
    else:
        Posted(peers, sends, receives, tag).finish(peers)


def _swap_directly(peers: DirectSubgroup, sent: torch.Tensor, received: torch.Tensor, tag: int) -> None:
    here = received.is_contiguous() and not received.is_cuda
    landing = received if here else torch.empty(received.shape, dtype=received.dtype)
    peers.swap_bytes(_bytes_of(sent.cpu().contiguous()), _bytes_of(landing), tag)
    if not here:
        received.copy_(landing)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


@contextmanager
def flat(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Give ``tensor`` as one contiguous dimension to read and write; a copy is written back at the end."""
    if tensor.is_contiguous():
        yield tensor.view(-1)
        return
    copy = tensor.contiguous()
    yield copy.view(-1)
    tensor.copy_(copy)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` to ``target``, which has as many elements and may be the same memory."""
    if target.data_ptr() != source.data_ptr() or target.stride() != source.stride():
        target.copy_(source.reshape(target.shape))


def echo(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` to ``target``; if the sizes differ, as much as fits, and zeros."""
    if target.numel() == source.numel():
        copy(target, source)
        return
    filled = torch.zeros(target.numel(), dtype=target.dtype, device=target.device)
    length = min(target.numel(), source.numel())
    filled[:length] = source.reshape(-1)[:length]
    target.copy_(filled.view(target.shape))


def others(peers: P2P) -> Sequence[int]:
    """Return the ranks of the other members."""
    return [rank for rank in range(peers.size) if rank != peers.rank]
