"""Policies of other packages: whatever they answer, the lighthouse goes on, and what is not sound is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from craft.control.core.policy_guard import guarded
from craft.decide.job.state import JobState, WorkerView
from craft.decide.techniques.technique import Chosen, NoSettings, Technique
from craft.protocol.actions import Reconfigure, Release, RequestDrain, Stop, TakeCheckpoint
from craft.protocol.events import AbortRequested
from craft.protocol.membership import Generation, Member

EVENT = AbortRequested()
MEMBERS = (Member(worker_id="w0"), Member(worker_id="w1"))
STATE = JobState(
    slots=2,
    workers=tuple(WorkerView(member=each, standing="member") for each in MEMBERS),
    generation=Generation(number=1, nonce="n", members=MEMBERS),
    highest=1,
)


class Journal:
    def __init__(self) -> None:
        self.lines: list[Any] = []

    def write(self, kind: str, value: Any, **more: Any) -> None:
        self.lines.append(value)


def made(answer: Callable[[], Any]) -> tuple[Any, Journal]:
    class Foreign(Technique[NoSettings]):
        name = "foreign"
        summary = "made for a test"

        def policies(self) -> Any:
            return (self,)

        def decide(self, state: JobState, event: Any) -> Any:
            return answer()

    journal = Journal()
    (policy,) = guarded(Chosen([Foreign(NoSettings())]), journal)
    return policy, journal


@pytest.mark.parametrize(
    "answer",
    [
        lambda: 1 / 0,
        lambda: None,
        lambda: ("drain",),
        lambda: (TakeCheckpoint(tag=5, reason="x"),),  # type: ignore[arg-type]
        lambda: (Stop(exit_code="x", reason="x"),),  # type: ignore[arg-type]
        lambda: (Reconfigure(members=("nobody",), reason="x"),),
        lambda: (Reconfigure(members=(), reason="x"),),
        lambda: (RequestDrain(worker_id=object(), reason="x"),),  # type: ignore[arg-type]
        lambda: (Release(worker_id="w0", reason="x"),),
    ],
)
def test_an_answer_that_is_not_sound_is_left_out_and_its_policy_is_asked_no_more(answer: Callable[[], Any]) -> None:
    policy, journal = made(answer)
    assert policy.decide(STATE, EVENT) == ()
    (failed,) = journal.lines
    assert failed.technique == "foreign" and "AbortRequested" in failed.where
    assert policy.decide(STATE, EVENT) == () and len(journal.lines) == 1


def test_a_sound_answer_counts_also_one_that_is_yielded() -> None:
    drain = RequestDrain(worker_id="w1", reason="hot")

    def answer() -> Any:
        yield drain

    policy, journal = made(answer)
    assert policy.decide(STATE, EVENT) == (drain,) and policy.decide(STATE, EVENT) == (drain,) and journal.lines == []
