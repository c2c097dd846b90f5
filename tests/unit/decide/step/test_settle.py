from __future__ import annotations

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from craft.decide.step.settle import IN_UPDATE, NO_PART, LossAnswer, settle
from craft.protocol.errors import CallsDiffer, ProtocolViolation, StateLost
from craft.protocol.membership import DROPPED, Claim, Settlement

STEP = 7


@st.composite
def claims_and_size(draw: st.DrawFn) -> tuple[list[Claim], int]:
    """Claims as they can be: step 7 in flight; laggards hold the result of step 6; joiners have nothing."""
    size = draw(st.integers(1, 12))
    kinds = draw(st.lists(st.sampled_from(["here", "laggard", "joiner"]), min_size=1, max_size=6))
    assume("here" in kinds)
    here = [rank for rank, kind in enumerate(kinds) if kind == "here"]
    place = st.tuples(st.sampled_from(here), st.sampled_from(["held", "pending", "nobody"]))
    places = draw(st.lists(place, min_size=size, max_size=size))
    no_result = "laggard" in kinds
    claims = []
    for rank, kind in enumerate(kinds):
        held, begun = (tuple(m for m, p in enumerate(places) if p == (rank, at)) for at in ("held", "pending"))
        name = f"w{rank}"
        if kind == "joiner":
            claims.append(Claim(worker_id=name, committed=None))
        elif kind == "laggard":
            claims.append(Claim(worker_id=name, committed=STEP - 1, result=3, held=(0,)))
        else:
            result = None if no_result else draw(st.sampled_from([None, 2, 3]))
            claims.append(Claim(worker_id=name, committed=STEP, result=result, held=held, pending=begun))
    return claims, size


def settled(claims: list[Claim], size: int, on_loss: LossAnswer = "redo") -> Settlement:
    return settle(claims, lambda step: size, on_loss)


@given(claims_and_size())
def test_every_member_comes_to_the_same_answer(case: tuple[list[Claim], int]) -> None:
    """P3: each has its own copy of the claims, as it came over the network."""
    claims, size = case
    copies = msgspec.msgpack.decode(msgspec.msgpack.encode(claims), type=list[Claim])

    assert settled(copies, size) == settled(claims, size)


@given(claims_and_size())
def test_every_microbatch_is_owned_once_and_never_by_a_joiner(case: tuple[list[Claim], int]) -> None:
    """P2: each microbatch has exactly one owner that can compute it."""
    claims, size = case

    answer = settled(claims, size)

    assert len(answer.owners) == size
    assert all(claims[owner].committed is not None for owner in answer.owners)


@given(claims_and_size())
def test_what_is_held_or_begun_stays_where_it_is_and_is_not_given_out(case: tuple[list[Claim], int]) -> None:
    """P1: a retry never recomputes what a survivor still holds."""
    claims, size = case
    answer = settled(claims, size)
    assume(answer.step == STEP)

    kept = {m: rank for rank, claim in enumerate(claims) if claim.committed == STEP for m in claim.held + claim.pending}

    assert all(answer.owners[m] == rank for m, rank in kept.items())
    assert not set(answer.given) & set(kept)
    if kept:
        assert set(answer.given) == set(range(size)) - set(kept)


@given(claims_and_size())
def test_laggards_commit_what_another_has_committed(case: tuple[list[Claim], int]) -> None:
    """P3: no worker is behind by more than what it has in hand."""
    claims, size = case
    laggards = tuple(claim.worker_id for claim in claims if claim.committed == STEP - 1)
    assume(laggards)

    answer = settled(claims, size)

    assert answer.commits == laggards
    assert answer.step == STEP


@given(claims_and_size())
def test_a_result_is_committed_only_if_all_with_state_hold_the_very_same(case: tuple[list[Claim], int]) -> None:
    """P3: results of different generations may differ, and are not committed together."""
    claims, size = case
    assume(all(claim.committed in (None, STEP) for claim in claims))
    results = {claim.result for claim in claims if claim.committed == STEP}

    answer = settled(claims, size)

    if len(results) == 1 and None not in results:
        assert answer.step == STEP + 1
        assert answer.commits == tuple(claim.worker_id for claim in claims if claim.committed == STEP)
    else:
        assert answer.step == STEP
        assert answer.commits == ()


@given(claims_and_size())
def test_shrink_drops_what_nobody_has_and_never_everything(case: tuple[list[Claim], int]) -> None:
    claims, size = case
    redo, shrink = settled(claims, size), settled(claims, size, "shrink")
    laggards = any(claim.committed == STEP - 1 for claim in claims)

    assert (shrink.step, shrink.commits) == (redo.step, redo.commits)
    dropped = [m for m, owner in enumerate(shrink.owners) if owner == DROPPED]
    if laggards or redo.step > STEP:
        assert shrink == redo
    else:
        assert dropped == list(redo.given)
        assert len(dropped) < size
        assert shrink.given == ()


def test_what_is_missing_goes_to_those_with_the_least_to_do() -> None:
    claims = [
        Claim(worker_id="a", committed=5, held=(0, 1)),
        Claim(worker_id="b", committed=5, pending=(2, 3)),
    ]

    answer = settled(claims, 6)

    assert answer.owners == (0, 0, 1, 1, 0, 0)
    assert answer.given == (4, 5)


def test_a_microbatch_that_two_hold_is_used_once() -> None:
    """P2: the lower rank's copy counts; both have the same bits."""
    claims = [Claim(worker_id="a", committed=5, held=(0, 1)), Claim(worker_id="b", committed=5, held=(1,))]

    assert settled(claims, 2).owners == (0, 0)


def test_past_the_last_step_there_is_nothing_to_own() -> None:
    claims = [Claim(worker_id="a", committed=5, result=1, held=(0,))]

    answer = settle(claims, lambda step: 1 if step < 6 else 0)

    assert (answer.step, answer.owners) == (6, ())


@pytest.mark.parametrize(
    "claims",
    [
        [Claim(worker_id="a", committed=6), Claim(worker_id="b", committed=5)],
        [Claim(worker_id="a", committed=7), Claim(worker_id="b", committed=5, result=2)],
    ],
)
def test_claims_that_the_commit_rule_excludes_end_the_job(claims: list[Claim]) -> None:
    """P3: better to stop than to split the history."""
    with pytest.raises(ProtocolViolation):
        settled(claims, 2)


def test_where_nobody_has_the_state_nothing_is_left_to_go_on_from() -> None:
    with pytest.raises(StateLost, match="nothing is left"):
        settled([Claim(worker_id="a", committed=None), Claim(worker_id="b", committed=None)], 2)


def test_under_wait_a_joiner_computes_what_was_lost() -> None:
    """P2"""
    claims = [
        Claim(worker_id="a", committed=5, held=(0,), pending=(1,)),
        Claim(worker_id="j", committed=None, able=False),
    ]

    answer = settle(claims, lambda step: 4, "wait")

    assert (answer.owners, answer.given, answer.idle, answer.joiners) == ((0, 0, 1, 1), (2, 3), (), ("j",))


def test_who_is_not_able_yet_is_given_nothing_unless_nobody_else_is_there() -> None:
    """P2"""
    keeps_up = Claim(worker_id="a", committed=5)
    catches_up = Claim(worker_id="b", committed=5, able=False)

    assert settled([keeps_up, catches_up], 2).owners == (0, 0)
    assert settled([keeps_up, catches_up], 2).idle == ("b",)
    assert settled([catches_up], 2).owners == (0, 0)
    assert settled([catches_up], 2).idle == ()


def test_a_collective_call_that_returned_to_somebody_is_completed_by_all_who_have_its_result() -> None:
    """P3"""
    returned, in_hand = (
        Claim(worker_id="a", committed=5, calls=2),
        Claim(worker_id="b", committed=5, calls=1, call_result=3),
    )
    waiting = Claim(worker_id="b", committed=5, calls=1)

    assert settled([returned, in_hand], 2).calls == 2
    assert settled([in_hand, replace(in_hand, worker_id="c")], 2).calls == 2
    assert settled([in_hand, waiting], 2).calls == 1
    with pytest.raises(ProtocolViolation, match="collective calls"):
        settled([returned, waiting], 2)


def test_who_takes_no_part_in_collective_calls_does_not_count_in_them() -> None:
    """P3"""
    claims = [Claim(worker_id="a", committed=5, calls=2), Claim(worker_id="j", committed=5, able=False, calls=NO_PART)]

    assert settled(claims, 2).calls == 2


def in_call(worker_id: str, calls: int = 0, call: str = "barrier", **more: object) -> Claim:
    return Claim(worker_id=worker_id, committed=STEP, calls=calls, call=call, **more)  # type: ignore[arg-type]


def test_a_call_that_another_worker_has_gone_past_is_found_by_all() -> None:
    beyond = [Claim(worker_id="w1", committed=STEP, pending=(2, 3)), Claim(worker_id="w2", committed=STEP)]
    with pytest.raises(
        CallsDiffer, match=r"job.barrier\(\) after step 6: w0 waits in it, but w1, w2 went on without it"
    ):
        settled([in_call("w0"), *beyond], 4)


def test_a_worker_that_waits_in_its_update_holds_nobody_to_a_call() -> None:
    beyond = [Claim(worker_id="w1", committed=STEP, pending=(2, 3)), Claim(worker_id="w2", committed=STEP)]

    assert settled([in_call("w0", call=IN_UPDATE), *beyond], 4).step == STEP
    assert settled([in_call("w0", call=IN_UPDATE), in_call("w1")], 4).step == STEP


def test_a_second_call_that_another_worker_does_not_make_is_found() -> None:
    with pytest.raises(CallsDiffer, match=r"job.evaluate\(\) after step 6: w0, w1 wait in it, but w2 went on"):
        settled([in_call("w0", 1, "evaluate"), in_call("w1", 1, "evaluate"), in_call("w2", 1, "", held=(0,))], 4)


@pytest.mark.parametrize(
    "other",
    [
        # In the same call; before its update, with the result of the step in hand; completed the call and has gone on.
        in_call("w1"),
        Claim(worker_id="w1", committed=STEP - 1, result=3),
        # Those who catch up, and who have no state, come to the call, or are told of it, later.
        in_call("w1", NO_PART, "", able=False),
        in_call("w1", 0, "", able=False),
        Claim(worker_id="w1", committed=None),
    ],
)
def test_a_call_that_the_others_are_in_or_come_to_goes_on(other: Claim) -> None:
    assert settled([in_call("w0"), other], 4).calls == 0


def test_a_call_that_another_worker_completed_returns_though_that_one_has_gone_on() -> None:
    late, gone_on = in_call("w0", call_result=3), Claim(worker_id="w1", committed=STEP, calls=1, pending=(0,))
    assert settled([late, gone_on], 4).calls == 1
