"""Plan which rank computes which microbatch of a step. Where models are sharded, replicas stand in the place of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from math import ceil

from craft.protocol.membership import DROPPED


@lru_cache(maxsize=64)
def plan(num_microbatches: int, num_ranks: int, slowness: tuple[float, ...] = ()) -> tuple[int, ...]:
    """Return the owner of each microbatch: contiguous shares whose sizes differ by at most one, larger ones first.

    Larger ones first keep shares on full nodes of the tree: 6 over 4 ranks gives 01|23|4|5. ``slowness`` is how many times
    longer a microbatch takes on each rank, if they differ: then some of the slow ranks' microbatches move, and the rest
    stays on full nodes.
    """
    share, extra = divmod(num_microbatches, num_ranks)
    owners: list[int] = []
    for rank in range(num_ranks):
        owners += [rank] * (share + (1 if rank < extra else 0))
    if not slowness:
        return tuple(owners)
    counts = [share + (1 if rank < extra else 0) for rank in range(num_ranks)]
    return _moved(owners, counts, _fair(counts, slowness))


def _fair(counts: Sequence[int], slowness: Sequence[float]) -> list[int]:
    """Return how many microbatches each rank gets so that the last one is done as early as possible.

    A rank that had one keeps one: without work it could not show that it is fast again.
    """
    fair = [min(1, count) for count in counts]
    done = [((fair[rank] + 1) * slowness[rank], rank) for rank in range(len(counts))]
    heapify(done)
    for _ in range(sum(counts) - sum(fair)):
        _, rank = done[0]
        fair[rank] += 1
        heapreplace(done, ((fair[rank] + 1) * slowness[rank], rank))
    return fair


def _moved(owners: Sequence[int], counts: Sequence[int], fair: Sequence[int]) -> tuple[int, ...]:
    """Move the last microbatches of too large shares to the other ranks: neighbours together, so that nodes stay full."""
    takers = [rank for rank, count in enumerate(counts) for _ in range(fair[rank] - count)]
    answer, place = list(owners), dict.fromkeys(range(len(counts)), 0)
    for microbatch, owner in enumerate(owners):
        place[owner] += 1
        if place[owner] > fair[owner]:
            answer[microbatch] = takers.pop(0)
    return tuple(answer)


def share_of(owners: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the microbatches of ``rank``, in order."""
    return tuple(microbatch for microbatch, owner in enumerate(owners) if owner == rank)


def give_out(
    owners: Sequence[int | None], loads: Sequence[int], *, idle: frozenset[int] = frozenset()
) -> tuple[int, ...]:
    """Give each microbatch without an owner to the rank with the least left to compute (the lowest on a tie).

    ``loads``: what each rank still has to compute; ranks in ``idle`` get nothing.
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
    """Return how many times longer a step computes after ``num_lost`` losses without replacement."""
    if num_workers <= num_lost:
        return 1.0
    before = ceil(num_microbatches / num_workers)
    return ceil(num_microbatches / (num_workers - num_lost)) / before


__all__ = ["DROPPED", "cost_of_loss", "give_out", "plan", "share_of"]
