"""What the lighthouse does about a slow worker: nothing, or it lets it leave."""

from __future__ import annotations

from msgspec.structs import replace

from craft.decide.job.state import JobState
from craft.protocol.actions import Drain, Propose
from craft.protocol.events import DrainRequested, GenerationEntered, StragglerFound

from .test_policies import formed, joined, told

FOUND = StragglerFound(
    worker_id="b", generation=1, step=40, ratio=3.0, own_ms=90.0, others_ms=30.0, steps=8, answer="drain"
)


def entered(state: JobState) -> JobState:
    assert state.generation is not None
    number = state.generation.number
    return told(state, *(GenerationEntered(worker_id=name, generation=number) for name in state.members))[0]


def test_a_slow_worker_is_drained_as_if_a_person_had_ordered_it() -> None:
    state, actions = told(entered(formed("a", "b", "c")), FOUND)

    drain, propose = actions
    assert isinstance(drain, Drain) and isinstance(propose, Propose)
    assert (drain.worker_id, propose.members) == ("b", ("a", "c"))
    assert "3 times as long" in drain.reason
    view = state.view("b")
    assert view is not None and view.draining


def test_a_spare_takes_its_place() -> None:
    _, (_, propose) = told(entered(formed("a", "b")), joined("s"), FOUND)

    assert isinstance(propose, Propose) and propose.members == ("a", "s")


def test_where_the_workers_answer_by_themselves_the_lighthouse_does_nothing() -> None:
    for answer in ("report", "rebalance"):
        state = entered(formed("a", "b", "c"))
        assert told(state, replace(FOUND, answer=answer)) == (state, ())


def test_nobody_is_drained_who_is_still_needed() -> None:
    assert told(entered(formed("a", "b", "c", min_workers=3)), FOUND)[1] == ()
    assert told(entered(formed("b")), FOUND)[1] == ()


def test_one_that_is_to_leave_already_or_is_gone_is_left_alone() -> None:
    leaving, _ = told(entered(formed("a", "b", "c")), DrainRequested(worker_id="b"))

    assert told(leaving, FOUND)[1] == ()
    assert told(entered(formed("a", "c")), FOUND)[1] == ()
