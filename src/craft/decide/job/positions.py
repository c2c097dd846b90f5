"""Give out positions in replicas: to the workers of hosts that hold parts of replicas, and to spares.

The workers of a host have positions in a row: that of the first is given out when its agent reports for the first time. An
agent that is started again gets the same, and one in the place of a lost host gets what that had.

A spare runs the script at a provisional position. One at the position of a free slot takes it at once. If there is none, and no
replacement is on the way, a spare of another position ends and is started again where a worker is needed.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from msgspec import UNSET
from msgspec.structs import replace

from craft.protocol.actions import MoveSpare
from craft.protocol.messages import HostPart, HostReport

if TYPE_CHECKING:
    from craft.decide.job.state import JobState


def registered(state: JobState, report: HostReport) -> JobState:
    """Return the state with the positions of the host that reports; the same state if they are known."""
    if report.part is UNSET or state.replica_size == 1:
        return state
    known = dict(state.parts)
    first = report.part.first_position
    if first is None:
        before = known.get(report.host)
        first = before.first_position if before is not None else None
    if first is None:
        first = _of_earlier_workers(state, report.host)
    if first is None:
        first = _free(state, report.host, report.part.workers)
    part = HostPart(workers=report.part.workers, first_position=first % state.replica_size)
    if known.get(report.host) == part:
        return state
    return replace(state, parts=tuple(sorted({**known, report.host: part}.items())))


def _of_earlier_workers(state: JobState, host: str) -> int | None:
    """Return the position of a host's first worker, as its known workers show it; None without any."""
    there = [view.member for view in state.workers if view.member.host == host]
    found = [
        (each.local_rank, each.slot.position)
        for each in there
        if each.slot is not UNSET and each.local_rank is not None
    ]
    if not found:
        return None
    # The lowest place: a spare may have been started again at another position.
    place, position = min(found)
    return (position - place) % state.replica_size


def _free(state: JobState, host: str, workers: int) -> int:
    """Return the first position of a new host: where the fewest others are."""
    size, taken = state.replica_size, _taken(state, host)
    return min(range(size), key=lambda first: (sum(taken[(first + place) % size] for place in range(workers)), first))


def _taken(state: JobState, host: str) -> list[int]:
    """Return how many workers each position has, or is about to have, on other hosts."""
    taken = [0] * state.replica_size
    living = state.having("waiting", "member")
    parts = dict(state.parts)
    seen = {view.member.host for view in state.workers}
    alive = {view.member.host for view in living}
    for name, part in parts.items():
        # A host whose workers are all gone makes room for another one.
        if name != host and (name in alive or name not in seen):
            for place in range(part.workers):
                taken[((part.first_position or 0) + place) % state.replica_size] += 1
    for view in living:
        if view.member.host not in parts and view.member.host != host:
            taken[state.position_of(view.member.worker_id)] += 1
    return taken


def spare_moves(state: JobState) -> tuple[MoveSpare, ...]:
    """Return the spares to start again, each at the position of a free slot that nothing else fills."""
    if state.replica_size == 1 or state.ending or not state.replacing or not state.spares:
        return ()
    staying = Counter(map(state.position_of, state.staying))
    free = {position: state.num_replicas - staying[position] for position in range(state.replica_size)}
    spares: dict[int, list[str]] = {position: [] for position in free}
    for worker_id in state.spares:
        spares[state.position_of(worker_id)].append(worker_id)
    coming = Counter(position for _, position in state.moving) + _replacements_coming(state)
    # Spares that no free slot of their own position needs, the latest first.
    idle = [each for position, there in spares.items() for each in there[max(0, free[position]) :]]
    moves = []
    for position, number in sorted(free.items()):
        lacking = number - len(spares[position]) - coming[position]
        for _ in range(max(0, min(lacking, len(idle)))):
            worker_id = idle.pop()
            reason = (
                f"position {position} lacks a worker, and this spare is at position {state.position_of(worker_id)}: it is started"
                " again there"
            )
            moves.append(MoveSpare(worker_id=worker_id, position=position, reason=reason))
    return tuple(moves)


def _replacements_coming(state: JobState) -> Counter[int]:
    """Return how many replacements are on the way to each position: of lost workers whose agents replace them."""
    living = state.having("waiting", "member")
    taken = {(view.member.host, view.member.local_rank) for view in living}
    alive = {view.member.host for view in living}
    exhausted = dict(state.unreplaced)
    places: dict[tuple[str, int | None], int] = {}
    for view in state.having("lost"):
        member = view.member
        place = (member.host, member.local_rank)
        # The agent of a worker that was seen to end lives; so does that of a host with living workers.
        replaces = (view.ended or member.host in alive) and member.host not in exhausted
        if member.slot is not UNSET and place not in taken and replaces:
            places[place] = member.slot.position
    return Counter(places.values())
