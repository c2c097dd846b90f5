"""Replicas of several workers: which member is where, what a replica holds, and who has the state.

A replica of one worker is numbered by its rank, so a job whose model is not sharded runs through the same functions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache

import msgspec
from msgspec import UNSET

from craft.protocol.errors import ProtocolViolation, StateLost
from craft.protocol.membership import Claim, Generation, Slot


class Layout(msgspec.Struct, frozen=True):
    """The members of a generation by replica and position."""

    replica_size: int = 1
    slots: tuple[Slot, ...] = ()
    """By rank; empty where every replica is one worker."""

    def replica_of(self, rank: int) -> int:
        """Return the replica of a member."""
        return self.slots[rank].replica if self.slots else rank

    def position_of(self, rank: int) -> int:
        """Return the position of a member."""
        return self.slots[rank].position if self.slots else 0

    def mates(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of a member's replica, itself included, in the order of positions."""
        return self.ranks_of(self.replica_of(rank))

    def ranks_of(self, replica: int) -> tuple[int, ...]:
        """Return the ranks of a replica, in the order of positions."""
        return _by_replica(self)[replica] if self.slots else (replica,)

    def is_complete(self, replica: int) -> bool:
        """Return whether a replica has a member at every position."""
        return len(self.ranks_of(replica)) == self.replica_size

    def complete(self, num_members: int) -> Sequence[int]:
        """Return the complete replicas, in the order of their numbers."""
        if not self.slots:
            return range(num_members)
        return [replica for replica, ranks in _by_replica(self).items() if len(ranks) == self.replica_size]

    def column(self, position: int, num_members: int) -> tuple[int, ...]:
        """Return the twins at ``position``: the ranks of all members there, which exchange gradients and state."""
        return tuple(rank for rank in range(num_members) if self.position_of(rank) == position)

    def by_replica(self, replicas: Sequence[int], by_rank: Sequence[float]) -> tuple[float, ...]:
        """Return the largest value of each replica; empty if there are none."""
        return tuple(max(by_rank[rank] for rank in self.ranks_of(replica)) for replica in replicas) if by_rank else ()


@lru_cache(maxsize=64)
def _by_replica(layout: Layout) -> dict[int, tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    for rank, slot in enumerate(layout.slots):
        found.setdefault(slot.replica, []).append(rank)
    return {
        replica: tuple(sorted(found[replica], key=lambda rank: layout.slots[rank].position))
        for replica in sorted(found)
    }


def layout_of(generation: Generation) -> Layout:
    """Return the layout of a generation."""
    members = generation.members
    if generation.replica_size is UNSET:
        return Layout()
    slots = tuple(member.slot for member in members if member.slot is not UNSET)
    if len(slots) != len(members) or len(set(slots)) != len(slots):
        raise ProtocolViolation(f"generation {generation.number} has members without a slot, or two in one")
    return Layout(generation.replica_size, slots)


def with_state(claims: Sequence[Claim], layout: Layout) -> frozenset[int]:
    """Return the ranks that have the state; raise StateLost if a position has none."""
    found = frozenset(rank for rank, claim in enumerate(claims) if claim.committed is not None)
    missing = frozenset(range(layout.replica_size)) - {layout.position_of(rank) for rank in found}
    if missing:
        raise StateLost(
            f"every worker that had the training state of position {min(missing)} is gone: no twin is left to go on from"
        )
    return found


def able_replicas(layout: Layout, members: Sequence[str], idle: Collection[str]) -> list[int]:
    """Return the replicas that are given microbatches: complete ones without an idle member."""
    if not layout.slots:
        return [rank for rank, member in enumerate(members) if member not in idle]
    complete = layout.complete(len(members))
    return [each for each in complete if not any(members[rank] in idle for rank in layout.ranks_of(each))]


def fit_replicas(claims: Sequence[Claim], layout: Layout, stateful: Collection[int]) -> list[int]:
    """Return the replicas that can compute: complete ones that keep pace, else with the state, else all complete ones.

    The last take their state from their twins, and the step waits for that.
    """
    complete = layout.complete(len(claims))
    if not complete:
        raise ProtocolViolation("no replica has a member at every position: none can compute")
    found = [replica for replica in complete if all(rank in stateful for rank in layout.ranks_of(replica))]
    keeping_pace = [replica for replica in found if all(claims[rank].able for rank in layout.ranks_of(replica))]
    return keeping_pace or found or list(complete)


def held_by(
    claims: Sequence[Claim], layout: Layout, replica: int, step: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the microbatches of ``step`` that a replica holds, and those that it has begun or was given.

    It holds what all its workers claim. Where they claim different ones, a beat broke: some have merged a leaf that others
    do not have, and cannot take it out of a sum again. Then the replica holds nothing.
    """
    ranks = layout.ranks_of(replica)
    mine = [claims[rank] for rank in ranks]
    if len(ranks) < layout.replica_size or any(claim.committed != step for claim in mine):
        return (), ()
    first = mine[0]
    held = first.held if all(claim.held == first.held for claim in mine) else ()
    if len(mine) == 1:
        return held, first.pending
    given = {microbatch for claim in mine for microbatch in (*claim.held, *claim.pending)}
    return held, tuple(sorted(given.difference(held)))
