"""What a seed decides before anything happens: the shape of the job, and its settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """The shape of one job."""

    hosts: tuple[int, ...] = (2, 2)
    """Workers of each host."""
    first_hosts: int = 2
    """So many hosts are there from the beginning; the others may join later."""
    own_lighthouse: bool = False
    """Whether ``craft run`` starts the lighthouse itself: then there is one host."""
    steps: int = 12
    microbatch_s: float = 0.05
    checkpoint_every: int = 0
    """In steps; 0: the job takes no checkpoints by itself."""
    checkpoints: bool = False
    min_workers: int = 1
    max_restarts: int = 100
    restore_tries: int = 3
    restore_limit_s: float = 25.0
    lease_s: float = 5.0
