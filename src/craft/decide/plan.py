"""Who computes which microbatch of a step."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from craft.protocol.membership import DROPPED


def plan(num_microbatches: int, num_ranks: int) -> tuple[int, ...]:
    """Return the owner of each microbatch: contiguous shares whose sizes differ by at most one, larger ones first.

    Larger ones first keeps shares on whole nodes of the tree: 6 over 4 ranks gives 01|23|4|5.
    """
    share, extra = divmod(num_microbatches, num_ranks)
    owners: list[int] = []
    for rank in range(num_ranks):
        owners += [rank] * (share + (1 if rank < extra else 0))
    return tuple(owners)


def share_of(owners: Sequence[int], rank: int) -> tuple[int, ...]:
    """The microbatches of ``rank``, in order."""
    return tuple(microbatch for microbatch, owner in enumerate(owners) if owner == rank)


def give_out(
    owners: Sequence[int | None], loads: Sequence[int], *, idle: frozenset[int] = frozenset()
) -> tuple[int, ...]:
    """Give each microbatch without an owner to the rank with the least left to compute (the lowest of several).

    ``loads`` is what each rank has still to compute; ranks in ``idle`` are given nothing.
    """
    todo = list(loads)
    able = [rank for rank in range(len(todo)) if rank not in idle]
    given: list[int] = []
    for owner in owners:
        if owner is None:
            owner = min(able, key=lambda rank: (todo[rank], rank))
            todo[owner] += 1
        given.append(owner)
    return tuple(given)


def cost_of_loss(num_microbatches: int, num_workers: int, num_lost: int = 1) -> float:
    """How much longer a step computes once some of ``num_workers`` are lost and not replaced: 1.0 is no longer at all."""
    if num_workers <= num_lost:
        return 1.0
    before = ceil(num_microbatches / num_workers)
    return ceil(num_microbatches / (num_workers - num_lost)) / before


__all__ = ["DROPPED", "cost_of_loss", "give_out", "plan", "share_of"]
