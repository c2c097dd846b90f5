"""Broadcast the requires_grad mask to workers that are catching up, at the start of every attempt.

Code between the steps may freeze or unfreeze parameters. A member that has not run it yet must still lay out its receive buffers
like the others: gradients travel without their lengths, or with lengths that must match.
"""

from __future__ import annotations

import torch

from craft.decide.step.ledger import Ledger
from craft.groups.group import P2P, Pending
from craft.worker.reduce.buckets import BucketLayout, bitmap

_TAG = 63
"""The last before those of buckets."""


def tell(group: P2P | None, ledger: Ledger, layout: BucketLayout) -> list[Pending]:
    """Send the mask as an attempt begins, on every member that is not a follower; keep the result until it ends.

    Raises GroupError if a connection has ended.
    """
    if group is None or not ledger.idle or not layout.params:
        return []
    data = torch.frombuffer(bytearray(bitmap(layout.trainable)), dtype=torch.uint8)
    if ledger.worker_id in ledger.idle:
        # It has run that code itself, though it computes nothing yet: it knows the mask.
        return [group.recv(torch.empty_like(data), _teller(ledger), _TAG)]
    if _teller(ledger) != group.rank:
        return []
    return [group.send(data, rank, _TAG) for rank in _twins(ledger) if ledger.members[rank] in ledger.idle]


def hear(group: P2P | None, ledger: Ledger, layout: BucketLayout) -> tuple[bool, ...]:
    """Return the mask of the attempt that begins, on a follower; raise GroupError if a member is lost."""
    if group is None or not layout.params:
        return tuple(layout.trainable)
    data = torch.zeros(-(-len(layout.params) // 8), dtype=torch.uint8)
    group.recv(data, _teller(ledger), _TAG).wait()
    bits = int.from_bytes(data.numpy().tobytes(), "little")
    return tuple(bool(bits >> index & 1) for index in range(len(layout.params)))


def _twins(ledger: Ledger) -> tuple[int, ...]:
    """Return the ranks that have the same parameters."""
    return ledger.layout.column(ledger.layout.position_of(ledger.rank), len(ledger.members))


def _teller(ledger: Ledger) -> int:
    """Return the rank of the first current member among them."""
    return next(rank for rank in _twins(ledger) if ledger.members[rank] not in ledger.idle)
