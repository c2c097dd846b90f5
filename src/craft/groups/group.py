"""The role ``Group``: the connections between the members of one generation.

The calls, in order, and who makes them:

1. ``open`` by a thread of its own, since it may hang when a member dies meanwhile; such a thread is simply left behind.
2. ``send``, ``recv``, ``all_reduce`` by the main thread, or by the exchange thread during backward, never both at once.
   They return at once with a ``Pending``; its ``wait`` blocks, and raises GroupError when the group is aborted or broken.
   ``wait_all`` waits for several, which costs as much as waiting for one.
3. ``abort`` by any thread, at any moment, as often as one likes: whoever is blocked in ``wait`` comes out in milliseconds.
4. ``close`` when nobody uses it any more.

A group that raised once is of no use any more, and neither are the buffers that it was to receive into: an operation that
is still pending may write into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

EXIT_NOT_FREED = 70
"""Exit code of a worker that ends itself because an abort did not free it; its agent starts another one."""

Parcels = Sequence[tuple[torch.Tensor, int]]
"""Contiguous tensors, each with the rank that it goes to or comes from."""


class Pending(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Block until it is done; raise GroupError if it never will be. Called again, it returns at once."""


class P2P(Protocol):
    """What an exchange needs of a group, or of a part of one."""

    generation: int
    rank: int
    size: int

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Send a contiguous tensor to ``peer``; it must not change until the operation is done."""

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Receive into a contiguous tensor from ``peer``."""

    def wait_all(self, pending: Sequence[Any]) -> None:
        """Wait for operations of this group; raises what the first of them to fail would."""


@runtime_checkable
class DeviceP2P(P2P, Protocol):
    """The same, where tensors also travel from device to device, on a stream of the group's own."""

    device: torch.device
    stream: torch.cuda.Stream

    def swap(self, sends: Parcels, receives: Parcels) -> None:
        """Put sends and receives on the stream. Between any two, what one sends the other receives in the same order."""

    def mark(self) -> torch.cuda.Event:
        """A mark behind everything that the stream has been given so far."""

    def wait_device(self, mark: torch.cuda.Event) -> None:
        """Block until the stream has come to ``mark``; raise GroupError if it never will."""


class Group(P2P, Protocol):
    """Connections between the members of one generation."""

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Sum a small tensor over all members, in place. Done here means that everybody has called it."""

    def abort(self) -> None:
        """Free everybody who is blocked in this group, here and (by the closed connections) at the peers."""

    def close(self) -> None:
        """Let go of the group's resources."""
