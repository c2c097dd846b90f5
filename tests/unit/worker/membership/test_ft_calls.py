"""Calls between the steps, of one that catches up: it takes what the others' calls returned, as long as there are others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from craft.decide.step.ledger import Ledger
from craft.protocol.errors import LeftBehind, SnapshotAborted
from craft.protocol.membership import Generation, Member
from craft.worker.membership import ft_calls
from craft.worker.membership.ft_calls import CallPlace, FaultTolerantCalls


def calls_of(generation: Generation, *idle: str) -> FaultTolerantCalls:
    """Those of worker j, which catches up."""
    ledger = Ledger(worker_id="j", step=20, members=generation.worker_ids, idle=frozenset(idle))
    participant: Any = SimpleNamespace(generation=generation, ledger=ledger, moved=False, group=None, step=20)
    return FaultTolerantCalls(participant, None, b"", lambda: None)


def after(step: int) -> CallPlace:
    return CallPlace(name=str(step), step=step)


def test_where_all_who_keep_pace_came_later_than_a_call_there_is_no_result_of_it_to_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ft_calls, "recall", lambda *_: b"\x91\xc4\x01a")
    generation = Generation(
        number=6, nonce="n", members=(Member(worker_id="j", since=3), Member(worker_id="k", since=5))
    )
    found = calls_of(generation, "j")
    with pytest.raises(LeftBehind, match="call 11/0"):
        found.gather("barrier", b"", after(11), 4, behind=True, followed=lambda: True)
    assert found.gather("barrier", b"", after(12), 5, behind=True, followed=lambda: True) == [b"a"], (
        "k was there by then"
    )


def test_whoever_turns_out_to_be_the_one_to_ask_makes_the_call_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that follows has settled that nobody else is left, and ends only then."""

    def recall(place: object, name: str, key: bytes, cancelled: Callable[[], bool], limit_s: float) -> bytes:
        assert any(cancelled() for _ in range(10)), "it waits for itself"
        raise SnapshotAborted("of no use")

    monkeypatch.setattr(ft_calls, "recall", recall)
    times = itertools.count()
    found = calls_of(Generation(number=6, nonce="n", members=(Member(worker_id="j", since=3),)))
    assert found.gather("barrier", b"own", after(11), 4, behind=True, followed=lambda: next(times) < 5) == [b"own"]
