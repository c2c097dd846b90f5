"""Form replicas from the workers that are there: each has a position, and a replica needs one at every position.

Complete replicas are never taken apart. From the others as many complete ones are made as the positions allow, with as few
workers moved as possible; of these, those that keep the workers of a host together. Workers that are on their way count as
present, so that a replica whose replacement is coming is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, islice

import msgspec

from craft.protocol.membership import Slot

_TRIED = 2000
"""Look at this many choices of replicas to complete; far more than there are where few workers are lost at a time."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that is there or on its way."""

    worker_id: str
    position: int
    replica: int | None = None
    """The replica that it is in; None: it is new."""
    host: str = ""


def paired(candidates: Sequence[Candidate], *, replica_size: int, num_replicas: int) -> tuple[Slot, ...]:
    """Return the slot of each candidate, in their order; no two have the same.

    There are at most ``num_replicas`` candidates at a position.
    """
    replicas = _replicas_of(candidates)
    slots = {
        candidate.worker_id: Slot(replica, candidate.position)
        for replica, members in replicas.items()
        if len(members) == replica_size
        for candidate in members.values()
    }
    loose = [each for each in candidates if each.worker_id not in slots]
    short = {replica: members for replica, members in replicas.items() if len(members) < replica_size}
    free = [replica for replica in range(num_replicas) if replica not in replicas]
    short.update({replica: {} for replica in free})
    slots.update(_completed(loose, short, replica_size))
    slots.update(_placed((each for each in loose if each.worker_id not in slots), slots.values(), num_replicas))
    return tuple(slots[candidate.worker_id] for candidate in candidates)


def fitting(positions: Iterable[int], arrivals: Sequence[tuple[str, int]], num_replicas: int) -> tuple[str, ...]:
    """Return those of ``arrivals``, (worker, position), whose position has a free slot beside those at ``positions``."""
    taken: dict[int, int] = {}
    for position in positions:
        taken[position] = taken.get(position, 0) + 1
    found = []
    for worker_id, position in arrivals:
        if taken.get(position, 0) < num_replicas:
            taken[position] = taken.get(position, 0) + 1
            found.append(worker_id)
    return tuple(found)


def num_complete(slots: Iterable[Slot], replica_size: int) -> int:
    """Return how many complete replicas these slots are."""
    count: dict[int, int] = {}
    for slot in slots:
        count[slot.replica] = count.get(slot.replica, 0) + 1
    return sum(each == replica_size for each in count.values())


def _replicas_of(candidates: Sequence[Candidate]) -> dict[int, dict[int, Candidate]]:
    found: dict[int, dict[int, Candidate]] = {}
    for each in candidates:
        if each.replica is not None:
            found.setdefault(each.replica, {})[each.position] = each
    return dict(sorted(found.items()))


def _completed(
    loose: Sequence[Candidate], short: Mapping[int, Mapping[int, Candidate]], replica_size: int
) -> dict[str, Slot]:
    """Return the slots of the workers of new complete replicas, which keep the numbers of short ones."""
    by_position = [[each for each in loose if each.position == position] for position in range(replica_size)]
    number = min((len(there) for there in by_position), default=0)
    if not number:
        return {}
    # Those with the most workers first, so that the first choices are good ones.
    order = sorted(short, key=lambda replica: (-len(short[replica]), replica))
    choices = islice(combinations(order, number), _TRIED)
    return min((_filled(sorted(chosen), short, by_position) for chosen in choices), key=lambda each: each[0])[1]


def _filled(
    chosen: Sequence[int], short: Mapping[int, Mapping[int, Candidate]], by_position: Sequence[Sequence[Candidate]]
) -> tuple[tuple[int, int], dict[str, Slot]]:
    """Complete the chosen replicas; return ((workers moved, workers on another host than most), slots)."""
    slots: dict[str, Slot] = {}
    hosts = {replica: [each.host for each in short[replica].values()] for replica in chosen}
    moved = 0
    for position, there in enumerate(by_position):
        gaps = [replica for replica in chosen if position not in short[replica]]
        for replica in chosen:
            if position in short[replica]:
                slots[short[replica][position].worker_id] = Slot(replica, position)
        spare = [each for each in there if each.worker_id not in slots]
        # Every new one that fits is used: it moves nowhere. The rest comes from replicas that are not completed.
        moves = max(0, len(gaps) - sum(each.replica is None for each in spare))
        moved += moves
        for replica in sorted(gaps, key=lambda each: -len(hosts[each])):
            usable = [each for each in spare if each.replica is None or moves]
            taken = min(usable, key=lambda each: (-hosts[replica].count(each.host), spare.index(each)))
            moves -= taken.replica is not None
            spare.remove(taken)
            slots[taken.worker_id] = Slot(replica, position)
            hosts[replica].append(taken.host)
    strangers = sum(len(each) - max(map(each.count, each)) for each in hosts.values() if each)
    return (moved, strangers), slots


def _placed(rest: Iterable[Candidate], taken: Iterable[Slot], num_replicas: int) -> dict[str, Slot]:
    """Return slots of those that complete no replica: where they are, or in the first free slot of their position."""
    used = set(taken)
    slots: dict[str, Slot] = {}
    waiting = []
    for each in rest:
        here = None if each.replica is None else Slot(each.replica, each.position)
        if here is None or here in used:
            waiting.append(each)
        else:
            used.add(here)
            slots[each.worker_id] = here
    for each in waiting:
        free = (Slot(replica, each.position) for replica in range(num_replicas))
        slot = next(slot for slot in free if slot not in used)
        used.add(slot)
        slots[each.worker_id] = slot
    return slots
