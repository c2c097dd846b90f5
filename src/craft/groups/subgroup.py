"""Some members of a group as a group of their own: over the same connections, with ranks and tags of its own.

NCCL's messages have no tags. Between devices two parts of a group must not be in use at once: those who use a part see to that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from craft.groups.group import P2P, DeviceP2P, Parcels, Pending


def part_of(group: P2P, ranks: Sequence[int], first_tag: int) -> P2P:
    """The members of these ranks, this one among them; what carries tensors between devices still does."""
    if isinstance(group, DeviceP2P):
        return DeviceSubgroup(group, ranks, first_tag)
    return Subgroup(group, ranks, first_tag)


class Subgroup:
    """By the connections between hosts."""

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


class DeviceSubgroup(Subgroup):
    """By those between devices, too: on the group's own stream."""

    def __init__(self, group: DeviceP2P, ranks: Sequence[int], first_tag: int) -> None:
        super().__init__(group, ranks, first_tag)
        self.device = group.device
        self.stream = group.stream
        self._devices = group

    def swap(self, sends: Parcels, receives: Parcels) -> None:
        self._devices.swap(self._of_group(sends), self._of_group(receives))

    def _of_group(self, parcels: Parcels) -> Parcels:
        return [(tensor, self._ranks[peer]) for tensor, peer in parcels]

    def mark(self) -> torch.cuda.Event:
        return self._devices.mark()

    def wait_device(self, mark: torch.cuda.Event) -> None:
        self._devices.wait_device(mark)
