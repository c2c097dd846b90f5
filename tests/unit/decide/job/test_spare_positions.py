"""Spares of a sharded job wait at a provisional position, and are started again where a worker is needed."""

from __future__ import annotations

from msgspec.structs import replace

from craft.decide.job.state import JobState
from craft.protocol.actions import AnyAction, DeclareLost, Drain, Hold, MoveSpare, Propose, Reconfigure
from craft.protocol.events import (
    AlertFired,
    DrainExpired,
    DrainRequested,
    GenerationEntered,
    ReplacementsEnded,
    StragglerFound,
    WorkerJoined,
)
from craft.protocol.events import WorkerCaughtUp as CaughtUp
from craft.protocol.membership import Member, Slot
from craft.protocol.values.alerts import AlertAnswer

from .test_sharded_job import entered, formed, lost, slots, told

ENDED = ReplacementsEnded(host="h", reason="--max-restarts is 0")


def spare(name: str, position: int, place: int = 9) -> WorkerJoined:
    return WorkerJoined(member=Member(worker_id=name, host="h", slot=Slot(-1, position), local_rank=place, late=True))


def with_spare(position: int) -> JobState:
    return told(entered(formed()), ENDED, spare("s", position))[0]


def kinds(actions: list[AnyAction]) -> tuple[object, ...]:
    return tuple(type(each) for each in actions)


def all_enter(state: JobState) -> tuple[JobState, list[AnyAction]]:
    assert state.generation is not None
    number = state.generation.number
    return told(state, *(GenerationEntered(worker_id=each, generation=number) for each in state.members))


def test_a_spare_of_the_lost_position_takes_the_slot_at_once() -> None:
    state, actions = told(with_spare(1), lost("b"))

    assert kinds(actions) == (Reconfigure,)
    assert slots(state.generation)["s"] == (0, 1)


def test_a_spare_of_another_position_is_started_again_at_the_lost_one() -> None:
    state, actions = told(with_spare(0), lost("b"))
    assert kinds(actions) == (Reconfigure,), "the others go on at once"
    state, actions = all_enter(state)

    (move,) = actions
    assert isinstance(move, MoveSpare) and (move.worker_id, move.position) == ("s", 1)
    assert state.moving == (("s", 1),) and state.spares == ()
    state, actions = told(state, spare("t", 1))
    assert kinds(actions) == (Propose,) and state.moving == ()
    assert slots(state.upcoming)["t"] == (0, 1)


def test_a_spare_stays_where_it_is_while_a_replacement_is_on_its_way() -> None:
    state, _ = told(entered(formed()), spare("s", 0), lost("b"))

    assert all_enter(state)[1] == []
    state, _ = all_enter(state)
    assert kinds(told(state, ENDED)[1]) == (MoveSpare,), "its agent gives up: now it is needed"


def test_with_too_few_workers_the_job_waits_for_a_spare_that_is_started_again() -> None:
    state, actions = told(replace(with_spare(0), min_workers=4), lost("b"))
    assert kinds(actions) == (Hold, MoveSpare), "and does not stop"

    state, actions = told(state, spare("t", 1))
    assert kinds(actions) == (Reconfigure,)
    assert slots(state.generation)["t"] == (0, 1)


def test_a_drain_waits_until_a_spare_is_started_again_at_the_position() -> None:
    state, actions = told(with_spare(0), DrainRequested(worker_id="b", reason="a loud fan"))
    assert kinds(actions) == (
        Drain,
        MoveSpare,
    )

    state, actions = told(state, spare("t", 1))
    assert kinds(actions) == (Propose,)
    assert slots(state.upcoming) == {"a": (0, 0), "t": (0, 1), "c": (1, 0), "d": (1, 1)}


def test_a_drain_does_not_wait_for_a_spare_that_fails_to_come() -> None:
    state, _ = told(with_spare(0), DrainRequested(worker_id="b", reason="a loud fan"))
    state, actions = told(state, lost("t"))

    assert kinds(actions) == (Propose,)
    assert slots(state.upcoming) == {"a": (0, 0), "c": (1, 0), "d": (1, 1)}


def test_the_last_worker_of_a_position_stays_until_a_twin_has_its_state() -> None:
    state, _ = told(entered(formed()), lost("b"))
    state, actions = told(all_enter(state)[0], DrainRequested(worker_id="d", reason="a loud fan"))
    assert kinds(actions) == (Drain,)

    state, actions = told(state, spare("e", 1, place=1))
    assert kinds(actions) == (Propose,) and set(slots(state.upcoming)) == {"a", "c", "d", "e"}
    number = state.highest
    events = [GenerationEntered(worker_id=each, generation=number, behind=each == "e") for each in "acde"]
    state, actions = told(state, *events)
    assert actions == [], "e has no state yet"
    state, actions = told(state, CaughtUp(worker_id="e"))
    assert kinds(actions) == (Propose,) and set(slots(state.upcoming)) == {"a", "c", "e"}


def test_a_whole_host_leaves_if_another_holds_every_position() -> None:
    state, actions = told(
        entered(formed()),
        DrainRequested(worker_id="c", reason="maintenance"),
        DrainRequested(worker_id="d", reason="maintenance"),
    )
    assert kinds(actions) == (
        Drain,
        Propose,
        Drain,
    )
    state, actions = all_enter_upcoming(state)
    assert set(slots(state.upcoming)) == {"a", "b"}


def all_enter_upcoming(state: JobState) -> tuple[JobState, list[AnyAction]]:
    assert state.upcoming is not None
    number, members = state.upcoming.number, state.upcoming.worker_ids
    return told(state, *(GenerationEntered(worker_id=each, generation=number) for each in members))


def test_a_last_copy_that_is_still_there_at_its_deadline_is_lost_by_request() -> None:
    state, _ = told(entered(formed()), lost("b"))
    state, _ = told(all_enter(state)[0], DrainRequested(worker_id="d", reason="a loud fan", deadline_s=5))
    _, actions = told(state, DrainExpired(worker_id="d"))

    assert [getattr(each, "worker_id", None) for each in actions] == ["d"]


def fired(answer: AlertAnswer, worker_id: str) -> AlertFired:
    return AlertFired(
        source="alertmanager",
        name="loud",
        fingerprint="1",
        starts_at="",
        labels={},
        answer=answer,
        worker_id=worker_id,
        reason="a loud fan",
    )


def test_an_alert_drains_or_fails_one_worker_of_a_replica() -> None:
    _, actions = told(entered(formed()), fired("drain", "b"))
    assert kinds(actions) == (Drain, Propose)

    _, actions = told(entered(formed()), fired("fail", "b"))
    assert [(type(each), getattr(each, "worker_id", "")) for each in actions] == [(DeclareLost, "b")]


def test_a_slow_worker_is_drained_only_if_its_position_has_another() -> None:
    found = StragglerFound(
        worker_id="d", generation=1, step=9, ratio=4.0, own_ms=40.0, others_ms=10.0, steps=9, answer="drain"
    )
    state, _ = told(entered(formed()), lost("b"))
    state, _ = all_enter(state)
    assert told(state, found)[1] == [], "it has the last copy of position 1"
    assert kinds(told(entered(formed()), found)[1]) == (Drain, Propose)
