"""Replicas are formed from complete sets of positions, and complete ones stay as they are."""

from __future__ import annotations

from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from craft.decide.job.pairing import Candidate, fitting, num_complete, paired
from craft.protocol.membership import Slot


def worker(name: str, replica: int | None, position: int, host: str = "") -> Candidate:
    return Candidate(worker_id=name, position=position, replica=replica, host=host)


def layout(*candidates: Candidate, size: int = 2, replicas: int = 2) -> dict[str, tuple[int, int]]:
    slots = paired(candidates, replica_size=size, num_replicas=replicas)
    return {each.worker_id: (slot.replica, slot.position) for each, slot in zip(candidates, slots, strict=True)}


def test_losses_at_different_positions_of_two_replicas_leave_one_complete_replica() -> None:
    found = layout(worker("a0", 0, 0), worker("b1", 1, 1))

    assert found == {"a0": (0, 0), "b1": (0, 1)}


def test_losses_at_the_same_position_leave_none_and_move_no_worker() -> None:
    assert layout(worker("a0", 0, 0), worker("b0", 1, 0)) == {"a0": (0, 0), "b0": (1, 0)}


def test_a_replacement_fills_the_gap_of_its_position() -> None:
    found = layout(worker("a0", 0, 0), worker("b0", 1, 0), worker("b1", 1, 1), worker("a1b", None, 1))

    assert found["a1b"] == (0, 1)


def test_a_replica_whose_replacement_is_on_its_way_is_left_alone() -> None:
    """With the newcomer counted as present, b's worker is not moved to a."""
    found = layout(worker("a0", 0, 0), worker("a1b", 0, 1), worker("b1", 1, 1))

    assert found == {"a0": (0, 0), "a1b": (0, 1), "b1": (1, 1)}


def test_the_replica_with_more_workers_is_completed() -> None:
    found = layout(worker("a0", 0, 0), worker("b1", 1, 1), worker("b2", 1, 2), worker("c1", 2, 1), size=3, replicas=3)

    assert found == {"a0": (1, 0), "b1": (1, 1), "b2": (1, 2), "c1": (2, 1)}


def test_workers_of_one_host_stay_together() -> None:
    found = layout(
        worker("a0", 0, 0, "x"),
        worker("b0", 1, 0, "y"),
        worker("new-y", None, 1, "y"),
        worker("new-x", None, 1, "x"),
    )

    assert found == {"a0": (0, 0), "b0": (1, 0), "new-y": (1, 1), "new-x": (0, 1)}


def test_only_workers_whose_position_has_a_free_slot_join() -> None:
    arrivals = [("e", 0), ("f", 1), ("g", 1)]

    assert fitting([0, 0, 1], arrivals, num_replicas=2) == ("f",)
    assert fitting([0, 0, 0], [("e", 0), ("f", 0)], num_replicas=4) == ("e",), (
        "replicas of one worker: as slots are free"
    )


@st.composite
def candidates(draw: st.DrawFn) -> tuple[list[Candidate], int, int]:
    size, replicas = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    slots = draw(st.lists(st.sampled_from([*product(range(replicas), range(size))]), unique=True))
    hosts = st.sampled_from("xyz")
    found = [worker(f"w{number}", replica, position, draw(hosts)) for number, (replica, position) in enumerate(slots)]
    room = {position: replicas - sum(each.position == position for each in found) for position in range(size)}
    for position, most in room.items():
        for number in range(draw(st.integers(0, most))):
            found.append(worker(f"n{position}{number}", None, position, draw(hosts)))
    return draw(st.permutations(found)), size, replicas


@given(candidates())
def test_every_worker_gets_one_slot_of_its_position_and_complete_replicas_stay(
    case: tuple[list[Candidate], int, int],
) -> None:
    there, size, replicas = case
    slots = paired(there, replica_size=size, num_replicas=replicas)

    assert len(set(slots)) == len(there)
    assert all(slot.position == each.position for each, slot in zip(there, slots, strict=True))
    assert all(0 <= slot.replica < replicas for slot in slots)
    count = Counter(each.replica for each in there if each.replica is not None)
    for each, slot in zip(there, slots, strict=True):
        if each.replica is not None and count[each.replica] == size:
            assert slot.replica == each.replica
    assert paired(there, replica_size=size, num_replicas=replicas) == slots


@given(candidates())
def test_there_are_as_many_complete_replicas_as_the_positions_allow_with_the_fewest_moves(
    case: tuple[list[Candidate], int, int],
) -> None:
    there, size, replicas = case
    slots = paired(there, replica_size=size, num_replicas=replicas)

    most = min(sum(each.position == position for each in there) for position in range(size))
    assert num_complete(slots, size) == most
    assert _moves(there, slots) == _fewest_moves(there, size, replicas, most)


@given(candidates())
def test_the_order_of_the_workers_changes_neither_their_number_nor_the_moves(
    case: tuple[list[Candidate], int, int],
) -> None:
    there, size, replicas = case
    forth = paired(there, replica_size=size, num_replicas=replicas)
    back = paired(there[::-1], replica_size=size, num_replicas=replicas)

    assert num_complete(forth, size) == num_complete(back, size)
    assert _moves(there, forth) == _moves(there[::-1], back)


def _moves(there: list[Candidate], slots: tuple[Slot, ...]) -> int:
    return sum(
        each.replica is not None and slot.replica != each.replica for each, slot in zip(there, slots, strict=True)
    )


def _fewest_moves(there: list[Candidate], size: int, replicas: int, most: int) -> int:
    """Over all sets of replicas that could be complete in the end: workers that come from another replica."""
    count = Counter(each.replica for each in there if each.replica is not None)
    intact = {replica for replica, number in count.items() if number == size}
    best = len(there)
    for chosen in product([False, True], repeat=replicas):
        final = {replica for replica in range(replicas) if chosen[replica]}
        if len(final) != most or not intact <= final:
            continue
        moves = 0
        for position in range(size):
            at = [each for each in there if each.position == position]
            stay = sum(each.replica in final for each in at)
            new = sum(each.replica is None for each in at)
            moves += max(0, most - stay - new)
        best = min(best, moves)
    return best
