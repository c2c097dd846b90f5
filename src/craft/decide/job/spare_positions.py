"""Choose spares that are to be started again at another position, where the model is sharded.

A spare runs the script at a provisional position. One at the position of a free slot takes it at once. If there is none, and no
replacement is on the way, a spare of another position ends and is started again where a worker is needed.
"""

from __future__ import annotations

from collections import Counter

from msgspec import UNSET

from craft.decide.job.state import JobState
from craft.protocol.actions import MoveSpare


def spare_moves(state: JobState) -> tuple[MoveSpare, ...]:
    """Return the spares to start again, each at the position of a free slot that nothing else fills."""
    if state.replica_size == 1 or state.ending or not state.replacing or not state.spares:
        return ()
    staying = Counter(map(state.position_of, state.staying))
    free = {position: state.num_replicas - staying[position] for position in range(state.replica_size)}
    spares: dict[int, list[str]] = {position: [] for position in free}
    for worker_id in state.spares:
        spares[state.position_of(worker_id)].append(worker_id)
    coming = Counter(position for _, position in state.moving) + _replacements(state)
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


def _replacements(state: JobState) -> Counter[int]:
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
