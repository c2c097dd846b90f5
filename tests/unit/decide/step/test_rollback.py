"""Going back to a checkpoint follows the rule of a step: if anybody has gone back, everybody does."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from craft.decide.step import ledger as ledgers
from craft.decide.step import regroup
from craft.decide.step.ledger import Ledger
from craft.decide.step.settle import settle
from craft.protocol.errors import ProtocolViolation
from craft.protocol.membership import Claim, Generation, Member

TARGET = (1, 400)


def claim(worker_id: str, **values: Any) -> Claim:
    return Claim(worker_id=worker_id, **{"committed": 601, "branch": 0, **values})


def rewound(worker_id: str, **values: Any) -> Claim:
    return Claim(worker_id=worker_id, branch=1, committed=400, rewinds=1, **values)


def test_whoever_holds_the_checkpoint_follows_one_that_went_back() -> None:
    found = settle([rewound("a"), claim("b", rewind_to=TARGET)], lambda _: 4)
    assert (found.step, found.branch, found.rewinds, found.commits) == (400, 1, 1, ())


def test_what_one_that_went_back_has_begun_goes_on() -> None:
    began = rewound("a", held=(0,), pending=(1,), size=4)
    found = settle([began, claim("b", rewind_to=TARGET)], lambda _: 99)
    assert found.owners[:2] == (0, 0) and found.given == (2, 3)


def test_if_all_hold_it_all_go_back_since_one_that_is_gone_may_have() -> None:
    found = settle([claim("a", rewind_to=TARGET), claim("b", rewind_to=TARGET)], lambda _: 4)
    assert (found.step, found.branch, found.rewinds, found.owners) == (400, 1, 1, ())


def test_if_some_do_not_hold_it_nobody_has_gone_back() -> None:
    found = settle([claim("a", rewind_to=TARGET), claim("b")], lambda _: 4)
    assert (found.step, found.branch, found.rewinds) == (601, 0, 0)


def test_one_that_joined_meanwhile_has_nothing_of_use_and_must_end() -> None:
    found = settle([rewound("a"), claim("b")], lambda _: 4)
    assert found.joiners == ("b",) and found.step == 400
    missed = Ledger(worker_id="b", step=601, generation=2, members=("a", "b"))
    with pytest.raises(ProtocolViolation, match="no checkpoint to go back to"):
        regroup.settled(missed, found)


def test_a_member_that_missed_the_one_before_would_be_a_bug() -> None:
    with pytest.raises(ProtocolViolation, match="does not hold the checkpoint"):
        settle([replace(rewound("a"), rewinds=2), claim("b", rewind_to=TARGET)], lambda _: 4)


def test_a_joiner_learns_the_branch() -> None:
    found = settle([rewound("a"), Claim(worker_id="j", committed=None)], lambda _: 4)
    assert found.joiners == ("j",) and (found.branch, found.rewinds) == (1, 1)
    joiner = replace(Ledger(worker_id="j", has_state=False), generation=1, members=("a", "j"))
    after = regroup.settled(joiner, found)
    assert (after.branch, after.step, after.rewinds) == (1, 400, 1)


def test_the_ledger_goes_back_when_the_settlement_says_so() -> None:
    generation = Generation(number=2, nonce="x", members=(Member(worker_id="a"), Member(worker_id="b")))
    entered = [
        Ledger(worker_id=name, step=601, generation=1, members=("a", "b"), held=frozenset({0}), owners=(0,))
        for name in "ab"
    ]
    entered = [regroup.enter(ledgers.verified(ledger, *TARGET), generation) for ledger in entered]
    found = settle([regroup.claim(ledger) for ledger in entered], lambda _: 4)
    after = regroup.settled(entered[0], found)
    assert (after.branch, after.step, after.rewinds, after.rewind_to, after.held) == (1, 400, 1, None, frozenset())


def test_what_was_in_hand_once_leads_nowhere_later() -> None:
    ledger = ledgers.discarded(ledgers.verified(Ledger(worker_id="a", step=50), *TARGET))
    assert regroup.claim(replace(ledger, step=500, members=("a",))).rewind_to is None
