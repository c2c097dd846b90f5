"""Treat some members of a group as a group: same connections, separate ranks and tags.

NCCL's messages have no tags, so that two subgroups must not use the devices at once: their users see to that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from craft.groups.direct import DirectConnection
from craft.groups.group import P2P, DeviceP2P, Pending, Transfers

_TRANSFERS_AHEAD = 8
"""Most transfers that the device may lag behind the host; with more, NCCL would block the host where no abort can free it."""


def part_of(group: P2P, ranks: Sequence[int], first_tag: int) -> P2P:
    """Return a subgroup of these ranks, which include this one; it transfers between devices if ``group`` does."""
    if isinstance(group, DeviceP2P):
        return DeviceSubgroup(group, ranks, first_tag)
    return Subgroup(group, ranks, first_tag)


class Subgroup:
    """A subgroup over the connections between hosts."""

    def __init__(self, group: P2P, ranks: Sequence[int], first_tag: int) -> None:
        self.generation = group.generation
        self.rank = ranks.index(group.rank)
        self.size = len(ranks)
        self._group = group
        self._ranks = ranks
        self._first_tag = first_tag

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        return self._group.send(tensor, self._ranks[peer], self._first_tag + tag)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        return self._group.recv(tensor, self._ranks[peer], self._first_tag + tag)

    def wait_all(self, pending: Sequence[Pending]) -> None:
        self._group.wait_all(pending)


class DirectSubgroup(Subgroup):
    """A subgroup of two that have a direct connection: without a hand-over to a thread that waits in Gloo."""

    def __init__(self, group: P2P, direct: DirectConnection, ranks: Sequence[int], first_tag: int) -> None:
        super().__init__(group, ranks, first_tag)
        self._direct = direct

    def swap_bytes(self, sent: memoryview, received: memoryview, tag: int) -> None:
        """Send to the other member and receive from it; both do so at the same point of their order."""
        kind = (self._first_tag + tag) % (1 << 32)
        self._direct.send(kind, [sent])
        self._direct.receive(kind, [received])


class DeviceSubgroup(Subgroup):
    """A subgroup that also transfers between devices, on the group's stream."""

    def __init__(self, group: DeviceP2P, ranks: Sequence[int], first_tag: int) -> None:
        super().__init__(group, ranks, first_tag)
        self.device = group.device
        self.stream = group.stream
        self._devices = group

    def swap(self, sends: Transfers, receives: Transfers) -> None:
        self._devices.swap(self._of_group(sends), self._of_group(receives))

    def _of_group(self, transfers: Transfers) -> Transfers:
        return [(tensor, self._ranks[peer]) for tensor, peer in transfers]

    def mark(self) -> torch.cuda.Event:
        return self._devices.mark()

    def wait_device(self, mark: torch.cuda.Event) -> None:
        self._devices.wait_device(mark)


class StreamedSubgroup(DeviceSubgroup):
    """A subgroup whose transfers the caller's stream waits for, and not the host: whether they arrived shows later."""

    def __init__(self, group: DeviceP2P, ranks: Sequence[int], first_tag: int, marks: deque[torch.cuda.Event]) -> None:
        """``marks``: events behind what was transferred; the caller waits for the last one before it relies on the data."""
        super().__init__(group, ranks, first_tag)
        self._marks = marks

    def wait_device(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(mark)
        self._marks.append(mark)
        while len(self._marks) > _TRANSFERS_AHEAD:
            super().wait_device(self._marks.popleft())


class SummingSubgroup(Subgroup):
    """A subgroup that also sums small tensors, as a ``Group`` does. Those of the whole group are aborted and closed with it."""

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Sum a small tensor over the members, in place; done when this returns."""
        peers = [peer for peer in range(self.size) if peer != self.rank]
        parts = {peer: torch.empty_like(tensor) for peer in peers}
        due = [self.recv(part, peer, 0) for peer, part in parts.items()]
        own = tensor.clone()
        self.wait_all([*due, *(self.send(own, peer, 0) for peer in peers)])
        for part in parts.values():
            tensor.add_(part)
        return _DONE

    def abort(self) -> None:
        raise NotImplementedError("the whole group is aborted")

    def close(self) -> None:
        raise NotImplementedError("the whole group is closed")


class _Done:
    def wait(self) -> None:
        """Return at once."""


_DONE = _Done()
