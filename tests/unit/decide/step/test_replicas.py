"""Replicas of several workers: what they hold, who has the state, and what a worker keeps from one generation to the next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from craft.decide.step import ledger as ledgers
from craft.decide.step import regroup
from craft.decide.step.ledger import Ledger
from craft.decide.step.replicas import Layout, layout_of
from craft.decide.step.settle import settle
from craft.protocol.errors import ProtocolViolation, StateLost
from craft.protocol.membership import Claim, Generation, GroupProgress, Member, Slot

SLOTS = {"a": Slot(0, 0), "b": Slot(0, 1), "c": Slot(1, 0), "d": Slot(1, 1), "e": Slot(0, 1)}
FOUR = Layout(2, tuple(SLOTS[name] for name in "abcd"))


def generation(number: int, names: str, **since: int) -> Generation:
    members = tuple(Member(worker_id=name, slot=SLOTS[name], since=since.get(name, 0)) for name in names)
    return Generation(number=number, nonce="x", members=members, replica_size=2)


def claim(name: str, **fields: object) -> Claim:
    return Claim(worker_id=name, **fields)  # type: ignore[arg-type]


def four(_: int) -> int:
    return 4


def begun(name: str, names: str = "abcd") -> Ledger:
    """The ledger of a worker in the first step of the first generation."""
    ledger = regroup.enter(Ledger(worker_id=name), generation(1, names))
    claims = [claim(each) for each in names]
    return regroup.settled(ledger, settle(claims, four, "redo", ledger.layout))


def test_microbatches_are_given_to_complete_replicas_and_not_to_workers() -> None:
    assert [begun(name).share for name in "abcd"] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    short = layout_of(generation(2, "acd"))
    assert settle([claim(name) for name in "acd"], four, "redo", short).owners == (1, 1, 1, 1)
    assert settle([claim(name) for name in "acd"], four, "redo", short).idle == (), (
        "a computes nothing, and stays current"
    )


def test_twins_are_the_members_of_one_position() -> None:
    assert (FOUR.column(0, 4), FOUR.column(1, 4)) == ((0, 2), (1, 3))
    assert Layout().column(0, 3) == (0, 1, 2)


def test_a_replica_holds_what_all_its_workers_claim() -> None:
    claims = [claim(name, held=(0,), pending=(1,)) for name in "ab"] + [claim(name, pending=(2, 3)) for name in "cd"]

    settlement = settle(claims, four, "redo", FOUR)

    assert (settlement.owners, settlement.held, settlement.given) == ((0, 0, 1, 1), (0,), ())


def test_a_replica_whose_workers_claim_different_ones_holds_nothing_and_computes_them_again() -> None:
    """P2: one has merged microbatch 1 into a sum with 0, and cannot take it out again."""
    claims = [
        claim("a", held=(0, 1)),
        claim("b", held=(0,), pending=(1,)),
        claim("c", held=(2, 3)),
        claim("d", held=(2, 3)),
    ]

    settlement = settle(claims, four, "redo", FOUR)

    assert (settlement.owners, settlement.held) == ((0, 0, 1, 1), (2, 3))


def test_a_replica_that_lost_a_worker_holds_nothing() -> None:
    claims = [claim("a", held=(0, 1)), claim("c", held=(2,), pending=(3,)), claim("d", held=(2,), pending=(3,))]

    settlement = settle(claims, four, "redo", layout_of(generation(2, "acd")))

    assert (settlement.owners, settlement.held, settlement.given) == ((1, 1, 1, 1), (2,), (0, 1))


def test_with_wait_other_replicas_compute_what_the_replica_of_the_replacement_lost() -> None:
    """Its mates are in the middle of the step: they take no beat for which a joiner would wait at its beginning."""
    layout = layout_of(generation(2, "aecd"))
    claims = [claim("a"), claim("e", committed=None, able=False), claim("c", held=(2, 3)), claim("d", held=(2, 3))]

    settlement = settle(claims, four, "wait", layout)

    assert (settlement.owners, settlement.idle, settlement.joiners) == ((1, 1, 1, 1), ("e",), ("e",))


def test_a_position_without_a_twin_that_has_the_state_is_named() -> None:
    with pytest.raises(StateLost, match="the training state of position 1 is gone: no twin is left"):
        settle([claim("a"), claim("c"), claim("d", committed=None)], four, "redo", layout_of(generation(2, "acd")))


def test_a_worker_commits_and_keeps_its_state_without_its_replica() -> None:
    """b is lost: a runs the update with the outputs that c records."""
    claims = [claim("a", result=1), claim("c", result=1), claim("d", result=1)]

    settlement = settle(claims, four, "redo", layout_of(generation(2, "acd")))

    assert (settlement.step, settlement.commits) == (1, ("a", "c", "d"))
    assert (settlement.idle, settlement.joiners) == ((), ())


def test_those_that_catch_up_are_idle_and_their_mates_stay_current() -> None:
    layout = layout_of(generation(2, "aecd"))
    claims = [claim("a"), claim("e", committed=None, able=False), claim("c"), claim("d")]

    settlement = settle(claims, four, "redo", layout)

    assert (settlement.owners, settlement.idle, settlement.joiners) == ((1, 1, 1, 1), ("e",), ("e",))


def test_two_incomplete_replicas_go_on_as_one_with_the_state_of_both() -> None:
    paired = Generation(
        number=2,
        nonce="x",
        members=(Member(worker_id="a", slot=Slot(0, 0)), Member(worker_id="d", slot=Slot(0, 1))),
        replica_size=2,
    )
    ledgers_of = {name: regroup.enter(ledgers.hold(begun(name), 0), paired) for name in "ad"}
    claims = [regroup.claim(ledgers_of[name]) for name in "ad"]

    assert [each.held for each in claims] == [(), ()], "what they held has no counterpart in the new replica"
    settlement = settle(claims, four, "redo", layout_of(paired))
    assert (settlement.owners, settlement.joiners) == ((0, 0, 0, 0), ())


def test_a_generation_without_a_complete_replica_is_never_settled() -> None:
    with pytest.raises(ProtocolViolation, match="no replica has a member at every position"):
        settle([claim("a"), claim("d")], four, "redo", layout_of(generation(2, "ad")))


def test_two_members_in_one_slot_are_refused() -> None:
    with pytest.raises(ProtocolViolation, match="or two in one"):
        layout_of(generation(2, "abe"))


def test_what_no_beat_confirmed_is_discarded_when_a_generation_is_entered() -> None:
    held = ledgers.confirmed(ledgers.hold(begun("a"), 0))
    leaf = ledgers.hold(held, 1)
    assert (held.leaf, leaf.leaf, leaf.held) == (None, 1, frozenset({0, 1}))

    entered = regroup.enter(leaf, generation(2, "abcd"))

    assert (regroup.claim(entered).held, regroup.claim(entered).pending) == ((0,), (1,))


def test_a_worker_in_the_middle_of_an_update_claims_the_step_after_it_and_nothing_of_that() -> None:
    """It can end the update later, with what its twins recorded; they may need its claim to commit the same step."""
    committed = ledgers.commit(ledgers.complete(begun("a")))

    claimed = regroup.claim(regroup.enter(committed, generation(2, "acd")))

    assert (claimed.committed, claimed.result, claimed.held, claimed.pending) == (1, None, (), ())


def test_a_member_of_a_short_replica_stays_current_but_performs_no_collective() -> None:
    ledger = regroup.enter(begun("a"), generation(2, "acd"))
    ledger = regroup.settled(ledger, settle([claim(name) for name in "acd"], four, "redo", ledger.layout))
    assert ledger.has_state and not ledger.is_complete and not ledger.is_live and ledger.share == ()

    after = ledgers.commit(ledgers.complete(ledger))

    assert (after.step, after.committed) == (1, 1)


def test_a_replica_is_live_once_all_its_workers_keep_pace() -> None:
    assert begun("a").is_live
    behind = ledgers.commit(ledgers.complete(begun("a")), able=("a", "c", "d"))
    assert not behind.is_live, "b catches up"
    assert ledgers.commit(ledgers.complete(behind), able=("a", "b", "c", "d")).is_live
    assert not Ledger(worker_id="a", members=("a", "b")).is_live, "a worker that is a replica has no collectives"


def test_an_update_is_performed_by_replicas_whose_workers_come_to_the_same_collectives() -> None:
    """a committed before the new generation, and is somewhere in its update: b begins it with a if a passed nothing."""
    held = {name: ledgers.complete(begun(name)) for name in "abcd"}
    held["a"] = ledgers.commit(held["a"])
    entered = {name: regroup.enter(held[name], generation(2, "abcd")) for name in "abcd"}
    settlement = settle([regroup.claim(each) for each in entered.values()], four, "redo", entered["a"].layout)
    assert settlement.commits == ("b", "c", "d")

    def together(progress: tuple[GroupProgress, ...]) -> dict[str, bool]:
        claims = [regroup.claim(each) for each in entered.values()]
        claims[0] = replace(claims[0], collectives=progress)
        settled = {name: regroup.settled(entered[name], settlement) for name in "abcd"}
        return {name: regroup.updates_together(each, claims, settlement) for name, each in settled.items()}

    assert together((GroupProgress(8, (0, 1), 1),)) == {"a": False, "b": False, "c": True, "d": True}
    assert all(together(()).values()), "a waits in its first collective, to which b comes"
    assert all(together((GroupProgress(8, (0,), 1),)).values()), "a passed one that b takes no part in"


def test_a_worker_of_another_replica_takes_the_others_out_of_the_plan_while_one_of_it_is_idle() -> None:
    ledger = ledgers.commit(ledgers.complete(begun("a")), able=("a", "c", "d"))

    assert ledgers.begin(ledger, 4).owners == (1, 1, 1, 1), "b is idle, so its replica computes nothing"


@given(st.integers(1, 6), st.integers(0, 9), st.data())
def test_replicas_of_one_worker_settle_as_without_a_layout(members: int, size: int, data: st.DataObject) -> None:
    split = plan_of(data, members, size)
    claims = [claim(f"w{rank}", held=held, pending=pending) for rank, (held, pending) in enumerate(split)]
    slots = tuple(Slot(rank, 0) for rank in range(members))

    plain = settle(claims, lambda _: size)

    assert settle(claims, lambda _: size, "redo", Layout(1, slots)) == plain
    ledger = replace(Ledger(worker_id="w0"), members=tuple(each.worker_id for each in claims))
    assert ledgers.begin(ledger, size).owners == ledgers.begin(replace(ledger, layout=Layout(1, slots)), size).owners


def plan_of(data: st.DataObject, members: int, size: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    owners = data.draw(st.lists(st.integers(-1, members - 1), min_size=size, max_size=size))
    done = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    return [
        (
            tuple(index for index in range(size) if owners[index] == rank and done[index]),
            tuple(index for index in range(size) if owners[index] == rank and not done[index]),
        )
        for rank in range(members)
    ]
