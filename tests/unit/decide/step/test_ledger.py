from __future__ import annotations

import pytest

from craft.decide.step.ledger import (
    Ledger,
    acknowledged,
    adopt,
    begin,
    commit,
    complete,
    hold,
    let_go,
)
from craft.decide.step.regroup import claim, enter, settled
from craft.decide.step.settle import settle
from craft.protocol.errors import ProtocolViolation
from craft.protocol.membership import DROPPED, Generation, Member


def generation(number: int, members: str, **since: int) -> Generation:
    return Generation(
        number=number,
        nonce="n",
        members=tuple(Member(worker_id=name, since=since.get(name, 0)) for name in members),
    )


def first(worker_id: str, members: str, size: int = 3) -> Ledger:
    """The ledger of a worker in step 0 of generation 1."""
    ledgers = [enter(Ledger(worker_id=name), generation(1, members)) for name in members]
    settlement = settle([claim(ledger) for ledger in ledgers], lambda step: size)
    return settled(next(ledger for ledger in ledgers if ledger.worker_id == worker_id), settlement)


def computed(ledger: Ledger) -> Ledger:
    for microbatch in ledger.pending:
        ledger = hold(ledger, microbatch)
    return ledger


def whole(ledger: Ledger) -> Ledger:
    return complete(computed(ledger))


def test_a_step_is_committed_only_when_every_member_has_acknowledged_it() -> None:
    """P3: idle members count too; with 2 microbatches, c has nothing to compute."""
    ledger = whole(first("a", "abc", size=2))
    assert not ledger.may_commit

    ledger = acknowledged(ledger, "b", 1, 0)
    assert not ledger.may_commit

    ledger = acknowledged(ledger, "c", 1, 0)
    assert ledger.may_commit


def test_acknowledgements_of_the_others_are_not_enough_without_the_result() -> None:
    """P3: who commits has the result itself."""
    ledger = acknowledged(acknowledged(computed(first("a", "abc")), "b", 1, 0), "c", 1, 0)

    assert not ledger.may_commit


def test_a_repeated_acknowledgement_counts_once() -> None:
    ledger = whole(first("a", "abc"))

    assert acknowledged(acknowledged(ledger, "b", 1, 0), "b", 1, 0) == acknowledged(ledger, "b", 1, 0)


@pytest.mark.parametrize(("number", "step"), [(0, 0), (2, 0), (1, 1)])
def test_an_acknowledgement_of_another_attempt_is_ignored(number: int, step: int) -> None:
    """P3: an old message cannot complete a new attempt."""
    ledger = whole(first("a", "ab"))

    assert acknowledged(ledger, "b", number, step) == ledger


def test_to_enter_is_a_promise_never_to_commit_under_an_older_generation() -> None:
    """P3: even if the last acknowledgement arrives right after."""
    ledger = acknowledged(whole(first("a", "abc")), "b", 1, 0)

    entered = acknowledged(enter(ledger, generation(2, "ab")), "c", 1, 0)

    assert entered.result == 1
    assert not entered.may_commit
    assert not acknowledged(entered, "b", 2, 0).may_commit


@pytest.mark.parametrize("number", [0, 1])
def test_a_generation_that_is_not_newer_is_refused(number: int) -> None:
    with pytest.raises(ProtocolViolation, match="does not follow 1"):
        enter(first("a", "ab"), generation(number, "ab"))


def test_only_members_enter() -> None:
    with pytest.raises(ProtocolViolation, match="not a member"):
        enter(first("a", "ab"), generation(2, "b"))


def test_what_is_held_and_begun_survives_a_change_of_rank() -> None:
    """P1: rank 1 becomes rank 0; its work stays its own."""
    ledger = first("b", "abc", size=6)
    ledger = hold(ledger, 2)

    entered = enter(ledger, generation(2, "bc"))

    assert entered.owners == (DROPPED, DROPPED, 0, 0, DROPPED, DROPPED)
    assert (entered.held, entered.pending) == (frozenset({2}), (3,))
    assert claim(entered).held == (2,)
    assert claim(entered).pending == (3,)


def test_entering_twice_without_settling_keeps_the_claim() -> None:
    ledger = hold(first("b", "abcd", size=8), 2)
    once = claim(enter(ledger, generation(2, "abc")))

    twice = claim(enter(enter(ledger, generation(2, "abc")), generation(3, "bc")))

    assert once == twice


def test_a_joiner_enters_without_state() -> None:
    entered = enter(Ledger(worker_id="j"), generation(4, "aj", j=4))

    assert claim(entered).committed is None


def test_a_founder_enters_a_later_first_generation_with_its_state() -> None:
    """It missed generation 1, which was never begun without it."""
    assert claim(enter(Ledger(worker_id="b"), generation(2, "bc"))).committed == 0


def test_who_was_left_out_for_a_while_comes_back_without_state() -> None:
    """P3: what it holds is from before the others went on without it."""
    ledger = whole(first("b", "ab"))

    back = claim(enter(ledger, generation(5, "ab", b=5)))

    assert (back.committed, back.result, back.held, back.pending) == (None, None, (), ())


def test_who_skipped_a_generation_it_was_a_member_of_keeps_its_state() -> None:
    """P1: nobody could commit without it."""
    ledger = whole(first("b", "abc"))

    assert claim(enter(ledger, generation(3, "ab", b=0))).result == 1


def test_a_settlement_that_says_commit_is_carried_out() -> None:
    a, b = (enter(whole(first(name, "abc")), generation(2, "ab")) for name in "ab")

    settlement = settle([claim(a), claim(b)], lambda step: 3)

    assert settled(a, settlement).committed == settled(b, settlement).committed == 1
    assert settled(a, settlement).owners == (0, 0, 1)
    assert settled(a, settlement).held == frozenset()


def test_a_settlement_that_says_go_on_drops_the_result_and_keeps_what_is_held() -> None:
    """P3: a result that is not committed now never will be."""
    a = enter(whole(first("a", "abc")), generation(2, "ab"))
    b = enter(computed(first("b", "abc")), generation(2, "ab"))

    after = settled(a, settle([claim(a), claim(b)], lambda step: 3))

    assert (after.committed, after.result, after.held) == (0, None, frozenset({0}))
    assert after.settled


def test_a_settlement_for_another_step_is_refused() -> None:
    ledger = enter(first("a", "ab"), generation(2, "a"))
    other = settle([claim(Ledger(worker_id="a", step=4))], lambda step: 3)

    with pytest.raises(ProtocolViolation, match="stands at step 0"):
        settled(ledger, other)


def test_a_joiner_takes_part_once_it_has_adopted_the_state() -> None:
    """P3: it acknowledges results that it queues, but counts as having no state until that is there."""
    a = enter(first("a", "a"), generation(2, "aj", j=2))
    joiner = enter(Ledger(worker_id="j"), generation(2, "aj", j=2))
    joiner = settled(joiner, settle([claim(a), claim(joiner)], lambda step: 3))
    assert joiner.share == ()

    assert (joiner.committed, joiner.idle) == (None, frozenset({"j"}))

    joiner = acknowledged(complete(joiner), "a", 2, 0)
    assert joiner.may_commit
    joiner = commit(joiner, ["a"])
    assert joiner.committed is None
    assert claim(joiner).committed is None
    assert adopt(joiner).committed == 1


def test_a_joiner_is_given_microbatches_from_the_step_after_it_said_that_it_is_able() -> None:
    """P2"""
    a = enter(first("a", "a"), generation(2, "aj", j=2))
    joiner = enter(Ledger(worker_id="j"), generation(2, "aj", j=2))
    a = settled(a, settle([claim(a), claim(joiner)], lambda step: 3))
    assert begin(a, 3).owners == (0, 0, 0)

    still_idle = commit(complete(a), ["a"])
    able = commit(complete(still_idle), ["a", "j"])

    assert begin(still_idle, 3).owners == (0, 0, 0)
    assert begin(able, 3).owners == (0, 0, 1)


def test_a_joiner_without_state_drops_what_it_queued_when_a_newer_generation_begins() -> None:
    """P3"""
    a = enter(first("a", "a"), generation(2, "aj", j=2))
    joiner = enter(Ledger(worker_id="j"), generation(2, "aj", j=2))
    joiner = complete(settled(joiner, settle([claim(a), claim(joiner)], lambda step: 3)))

    again = enter(joiner, generation(3, "aj", j=2))

    assert (again.result, again.held, claim(again).committed) == (None, frozenset(), None)


def test_a_committed_step_is_followed_by_a_planned_one() -> None:
    ledger = commit(acknowledged(whole(first("a", "ab")), "b", 1, 0))
    assert (ledger.committed, ledger.held, ledger.owners) == (1, frozenset(), ())

    begun = begin(ledger, 3)

    assert begun.owners == (0, 0, 1)
    assert begin(begun, 3) == begun


def test_without_a_result_there_is_nothing_to_commit() -> None:
    with pytest.raises(ProtocolViolation, match="no result"):
        commit(first("a", "ab"))


def test_a_step_that_is_taken_back_is_computed_again_by_those_whose_it_is_now() -> None:
    """P2: one had come to its end, the other one was in it still; what the lost one had is given out."""
    one, other = let_go(computed(first("a", "abc"))), let_go(first("b", "abc"), [1])
    ledgers = [enter(one, generation(2, "ab")), enter(other, generation(2, "ab"))]
    claims = [claim(ledger) for ledger in ledgers]
    again = [settled(ledger, settle(claims, lambda step: 3)) for ledger in ledgers]

    assert [each.again for each in claims] == [(0,), (1,)]
    assert not again[0].held and again[0].pending == again[0].share
    assert sorted(again[0].pending + again[1].pending) == [0, 1, 2]


def test_what_is_let_go_stays_with_who_had_computed_it_and_only_what_was_lost_is_given_out() -> None:
    """P2: also where one has the result in hand already, and another one does not."""
    one, other = let_go(whole(first("a", "abc"))), let_go(computed(first("b", "abc")))
    ledgers = [enter(one, generation(2, "ab")), enter(other, generation(2, "ab"))]
    claims = [claim(ledger) for ledger in ledgers]
    settlement = settle(claims, lambda step: 3)

    assert [(each.held, each.pending, each.again) for each in claims] == [((), (0,), (0,)), ((), (1,), (1,))]
    assert (settlement.step, settlement.owners, settlement.given) == (0, (0, 1, 0), (2,))
    assert [settled(ledger, settlement).pending for ledger in ledgers] == [(0, 2), (1,)]


def test_a_result_in_hand_is_committed_though_what_it_is_the_sum_of_was_let_go() -> None:
    """P3: somebody who is gone may have committed it."""
    ledgers = [enter(let_go(whole(first(name, "abc"))), generation(2, "ab")) for name in "ab"]
    settlement = settle([claim(ledger) for ledger in ledgers], lambda step: 3)

    assert (settlement.step, settlement.commits) == (1, ("a", "b"))
    assert not settled(ledgers[0], settlement).again
