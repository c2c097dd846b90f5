"""The role ``Group``: the connections between the members of one generation.

The calls, in order, and who makes them:

1. ``open`` on a separate thread, since it may hang when a member dies meanwhile; the thread is then abandoned.
2. ``send``, ``recv``, ``all_reduce`` by the main thread, or by the exchange thread during backward, never both at once.
   They return at once with a ``Pending``; its ``wait`` blocks, and raises GroupError when the group is aborted or broken.
   ``wait_all`` waits for several, which costs as much as waiting for one.
3. ``abort`` by any thread, at any moment, any number of times: blocked ``wait`` calls return in milliseconds.
4. ``close`` when the group is no longer in use.

A group that raised once is unusable, and so are its receive buffers: an operation that is still pending may write into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

EXIT_NOT_FREED = 70
"""Exit code of a worker that ends itself because an abort did not free it; its agent starts another one."""

Transfers = Sequence[tuple[torch.Tensor, int]]
"""Contiguous tensors, each with the rank that it goes to or comes from."""


class Pending(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Block until it is done; raise GroupError if it fails. Called again, it returns at once."""


class P2P(Protocol):
    """Point-to-point operations of a group, or of a subgroup."""

    generation: int
    rank: int
    size: int

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Send a contiguous tensor to ``peer``; it must not change until the operation is done."""

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Receive into a contiguous tensor from ``peer``."""

    def wait_all(self, pending: Sequence[Any]) -> None:
        """Wait for operations of this group; raise the first error among them."""


@runtime_checkable
class DeviceP2P(P2P, Protocol):
    """Point-to-point operations that also transfer between devices, on the group's stream."""

    device: torch.device
    stream: torch.cuda.Stream

    def swap(self, sends: Transfers, receives: Transfers) -> None:
        """Enqueue sends and receives on the stream. Each pair of ranks must list them in the same order."""

    def mark(self) -> torch.cuda.Event:
        """Return an event behind everything enqueued on the stream so far."""

    def wait_device(self, mark: torch.cuda.Event) -> None:
        """Block until the stream reaches ``mark``; raise GroupError if it never will."""


class Group(P2P, Protocol):
    """Connections between the members of one generation."""

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Sum a small tensor over all members, in place. Completion means that every member has called it."""

    def abort(self) -> None:
        """Unblock every waiter in this group, here and (through the closed connections) at the peers."""

    def close(self) -> None:
        """Release the group's resources."""
