"""The roles between torch's process groups and the replica that they run in.

1. torch, FSDP2 or the script calls a ``ReplicaGroup``, which makes an ``Operation`` of the call.
2. ``Replica.run`` performs it (``live``), answers it without the peers (``echo``), or fills ``outputs`` with recorded values.
3. The call returns when ``run`` does. What it gave to torch is complete then, except for ``isend`` and ``irecv``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from craft.groups.group import P2P

TAGS = 8
"""An operation uses tags from 0 up to this: the range to reserve for each process group."""


class Operation(Protocol):
    """One collective, or one message, as a worker takes part in it."""

    @property
    def name(self) -> str:
        """Return what it does: "all_gather", "reduce_scatter", ..."""

    @property
    def outputs(self) -> Sequence[torch.Tensor]:
        """Return the tensors that it writes, in a fixed order; empty if this worker only sends."""

    def live(self, peers: P2P) -> None:
        """Perform it with the other members; raise GroupError if the group breaks, with undefined outputs."""

    def echo(self) -> None:
        """Fill the outputs as if every peer had sent what this worker sent; zeros where this worker sends nothing."""


class Replica(Protocol):
    """The worker's replica: decides how each operation is answered."""

    position: int
    size: int

    def run(self, group: str, ranks: Sequence[int], operation: Operation) -> None:
        """Answer ``operation`` of the process group ``group``, whose members are at these positions.

        A broken group is no error here: the operation is echoed, and the replica knows that what follows counts for nothing.
        """
