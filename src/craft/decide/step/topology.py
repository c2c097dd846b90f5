"""How a generation's members are spread over hosts, and whether their blocks are summed within a host first.

Within a host first, one member of each host collects a slice of its neighbours' blocks, sums them into full nodes of the
tree, and sends only these to its peers on other hosts. The result comes back once per host. Fewer bytes go between
hosts, at the price of one more wait within each: so only where several hosts have several members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import msgspec

from craft.decide.step.plan import share_of
from craft.decide.step.tree import Node, cover


class HostTopology(msgspec.Struct, frozen=True):
    """The ranks of each host; hosts are numbered in the order of their first ranks."""

    ranks: tuple[tuple[int, ...], ...]

    @property
    def num_hosts(self) -> int:
        return len(self.ranks)

    @property
    def size(self) -> int:
        return sum(map(len, self.ranks))

    @property
    def num_slices(self) -> int:
        """The number of slices of a bucket: one for each member of the largest host."""
        return max(map(len, self.ranks))

    def host_of(self, rank: int) -> int:
        return next(host for host, ranks in enumerate(self.ranks) if rank in ranks)

    def collector(self, piece: int, host: int) -> int:
        """Return the member of ``host`` that collects slice ``piece``; on a smaller host some collect several."""
        return self.ranks[host][piece % len(self.ranks[host])]

    def nodes(self, host: int, owners: Sequence[int]) -> tuple[Node, ...]:
        """Return the fewest nodes of the tree that are all that a host's members hold."""
        here = frozenset(self.ranks[host])
        return cover([microbatch for microbatch, owner in enumerate(owners) if owner in here], len(owners))


def spread_of(hosts: Sequence[str]) -> HostTopology:
    """Return the topology; ``hosts`` names the host of each rank."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return HostTopology(tuple(map(tuple, ranks.values())))


def host_first(hosts: Sequence[str], owners: Sequence[int]) -> HostTopology | None:
    """Return the topology if blocks of the plan are summed within hosts first; None if they go straight to owners."""
    if len(set(hosts)) < 2:
        return None
    spread = spread_of(hosts)
    if sum(1 for ranks in spread.ranks if len(ranks) > 1) < 2:
        return None
    return spread if between_by_host(spread, owners) < between_flat(spread, owners) else None


def both_sum(spread: HostTopology, owners: Sequence[int]) -> bool:
    """Return whether two hosts exchange all they hold and each sums everything: as many bytes, one wait less."""
    return spread.num_hosts == 2 and _num_nodes(spread, owners) <= 2


def _num_nodes(spread: HostTopology, owners: Sequence[int]) -> int:
    return sum(len(spread.nodes(host, owners)) for host in range(spread.num_hosts))


def between_flat(spread: HostTopology, owners: Sequence[int]) -> Fraction:
    """Return how often all gradient bytes go between hosts when every rank sums its own chunk."""
    total = 0
    for ranks in spread.ranks:
        away = spread.size - len(ranks)
        blocks = sum(len(cover(share_of(owners, rank), len(owners))) for rank in ranks)
        total += away * (blocks + len(ranks))
    return Fraction(total, spread.size)


def between_by_host(spread: HostTopology, owners: Sequence[int]) -> Fraction:
    """Return the same when blocks are summed within hosts first."""
    nodes, others = _num_nodes(spread, owners), spread.num_hosts - 1
    return Fraction(nodes) if both_sum(spread, owners) else Fraction(nodes * others, spread.num_hosts) + others


def seated(staying: Sequence[str], joining: Sequence[str], host_of: Callable[[str], str]) -> tuple[str, ...]:
    """Return the members in the order of their ranks: a joiner comes after the last one of its host, else at the end.

    So neighbours in the plan are neighbours on a host, and what a host holds forms few nodes.
    """
    if not joining:
        return tuple(staying)
    behind: dict[str, list[str]] = {}
    for worker_id in joining:
        behind.setdefault(host_of(worker_id), []).append(worker_id)
    last = {host_of(worker_id): worker_id for worker_id in staying}
    order: list[str] = []
    for worker_id in staying:
        order.append(worker_id)
        if last[host := host_of(worker_id)] == worker_id:
            order += behind.pop(host, ())
    return (*order, *(worker_id for each in behind.values() for worker_id in each))
