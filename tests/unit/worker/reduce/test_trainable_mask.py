"""Whoever follows hears what is trained from the first that keeps pace, and nobody else waits for anything."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import torch
from tests.unit.worker.blocks import no_buffers
from tests.unit.worker.members import LIMIT_S, together

from craft.decide.step.ledger import Ledger
from craft.groups.gloo import GlooGroup
from craft.groups.group import Pending
from craft.protocol.control_word import Word
from craft.worker.reduce import trainable_mask
from craft.worker.reduce.accumulator import GradientAccumulator
from craft.worker.reduce.buckets import BucketLayout
from craft.worker.reduce.exchange import Attempt
from craft.worker.reduce.flats import Flats

MEMBERS = ("w0", "w1", "w2", "w3")


def layout_of(*trained: bool) -> BucketLayout:
    return BucketLayout([torch.nn.Parameter(torch.zeros(3), requires_grad=each) for each in trained], 1 << 20)


def wait(pending: list[Pending]) -> None:
    for each in pending:
        each.wait()


def test_followers_hear_it_and_one_that_has_just_caught_up_takes_it_and_knows_better() -> None:
    now, before = [True, False, True] * 3, [True] * 9

    def act(group: GlooGroup) -> tuple[bool, ...]:
        ledger = Ledger(worker_id=MEMBERS[group.rank], members=MEMBERS, idle=frozenset({"w0", "w3"}))
        if group.rank == 0:
            # All take it for a follower still.
            wait(trainable_mask.tell(group, ledger, layout_of(*now)))
            return tuple(now)
        if group.rank == 3:
            return trainable_mask.hear(group, ledger, layout_of(*before))
        told = trainable_mask.tell(group, ledger, layout_of(*now))
        assert len(told) == (2 if group.rank == 1 else 0)
        wait(told)
        return tuple(now)

    assert together(4, act) == [tuple(now)] * 4


def test_where_nobody_follows_nothing_is_sent() -> None:
    def act(group: GlooGroup) -> int:
        ledger = Ledger(worker_id=MEMBERS[group.rank], members=MEMBERS[:2])
        return len(trainable_mask.tell(group, ledger, layout_of(True)))

    assert together(2, act) == [0, 0]
    assert trainable_mask.tell(None, Ledger(worker_id="w0", members=("w0",)), layout_of(True)) == []
    assert trainable_mask.hear(None, Ledger(worker_id="w0", members=("w0",)), layout_of(True, False)) == (True, False)


def test_a_follower_that_is_gone_breaks_the_attempt_and_not_the_script() -> None:
    left = threading.Event()

    def act(group: GlooGroup) -> str:
        ledger = Ledger(worker_id=MEMBERS[group.rank], members=MEMBERS[:2], idle=frozenset({"w1"}))
        if group.rank == 1:
            group.close()
            left.set()
            return ""
        assert left.wait(LIMIT_S)
        layout = layout_of(True)
        route = cast(Any, SimpleNamespace(begin=lambda: None))
        attempts = [Attempt(0, group, route, GradientAccumulator(layout), Flats(layout), no_buffers)]
        # Until the closed connection is noticed, sends may seem to succeed.
        while attempts[-1].error is None:
            attempts.append(Attempt(0, group, route, GradientAccumulator(layout), Flats(layout), no_buffers))
            attempts[-1].tell(lambda: trainable_mask.tell(group, ledger, layout))
        return "" if attempts[-1].finish(lambda: Word(step=0)) else "broken"

    assert together(2, act) == ["broken", ""]
