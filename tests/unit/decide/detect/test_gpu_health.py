"""From readings of a GPU to conditions, and from these to actions: stories, with the clock as an argument."""

from __future__ import annotations

from typing import Any

import pytest

from craft.decide.detect.gpu_health import GpuCondition, GpuHistory, HealthSettings, notice
from craft.decide.job.state import JobState, WorkerView
from craft.decide.policies.detected import HealthPolicy
from craft.protocol.actions import AnyAction, DeclareLost, RequestDrain
from craft.protocol.events import ConditionSeen
from craft.protocol.membership import Generation, Member
from craft.protocol.values.gpu import Reading

DEVICE = "H200 GPU-1"
SETTINGS = HealthSettings(heat_s=10.0)


def told(*readings: tuple[float, Reading]) -> list[GpuCondition]:
    health, everything = GpuHistory(), list[GpuCondition]()
    for now, reading in readings:
        health, seen = notice(health, reading, now, SETTINGS)
        everything += seen
    return everything


def reading(**fields: object) -> Reading:
    return Reading(device=DEVICE, **fields)  # type: ignore[arg-type]


def test_a_healthy_gpu_has_nothing_to_tell() -> None:
    assert told(*((float(now), reading(uncorrected=2, temperature_c=60)) for now in range(100))) == []


def test_ecc_errors_count_from_the_first_look_on_and_each_time_there_are_more() -> None:
    readings = [(float(now), reading(uncorrected=count)) for now, count in enumerate((7, 7, 9, 9, 10, 0, 0, 1))]
    assert [(each.what, each.value) for each in told(*readings)] == [("ecc", 2.0), ("ecc", 1.0), ("ecc", 1.0)]


def test_a_gpu_that_does_not_count_ecc_errors_has_none() -> None:
    assert told((0.0, reading(uncorrected=None)), (1.0, reading(uncorrected=4)), (2.0, reading(uncorrected=None))) == []


def test_heat_is_told_once_it_has_lasted_and_once_more_when_it_is_over() -> None:
    hot = reading(hot=("hardware thermal slowdown",), temperature_c=95)
    cool = reading(temperature_c=70)
    short = told((0.0, hot), (9.0, hot), (10.0, cool), (11.0, hot), (20.0, hot))
    assert short == []
    seen = told((0.0, hot), (10.0, hot), (20.0, hot), (30.0, cool), (31.0, cool))
    assert [(each.what, each.value) for each in seen] == [("heat", 95), ("heat is over", 70)]
    assert seen[0].detail == f"{DEVICE} is held down for 10 s: hardware thermal slowdown"


def test_xids_are_told_with_their_meaning_and_those_of_programs_are_minor() -> None:
    seen = told((0.0, reading(xids=(79, 31))), (1.0, reading(xids=(12345,))))
    assert [(each.what, each.value) for each in seen] == [("xid", 79.0), ("minor xid", 31.0), ("minor xid", 12345.0)]
    assert seen[0].detail == f"{DEVICE}: XID 79, the GPU fell off the bus"


def test_a_gpu_that_is_gone_is_told_once_and_with_the_xid_that_announced_it() -> None:
    gone = reading(lost="GPU is lost", xids=(79,))
    assert [each.what for each in told((0.0, gone), (1.0, reading(lost="GPU is lost")))] == ["xid", "lost"]


def job(*draining: str, min_workers: int = 1) -> JobState:
    members = tuple(Member(worker_id=f"w{number}") for number in range(3))
    views = tuple(
        WorkerView(member=member, standing="member", draining="told" if member.worker_id in draining else None)
        for member in members
    )
    generation = Generation(number=1, nonce="n", members=members)
    return JobState(slots=3, min_workers=min_workers, workers=views, generation=generation)


def answer(what: str, state: JobState, **settings: Any) -> tuple[AnyAction, ...]:
    event = ConditionSeen(technique="gpu_health", what=what, worker_id="w1", host="a", detail=f"{DEVICE}: why")
    return HealthPolicy("gpu_health", HealthSettings(**settings)).decide(state, event)


@pytest.mark.parametrize("what", ["lost", "ecc", "xid"])
def test_what_a_gpu_does_not_get_over_has_its_worker_replaced_for_the_reason_that_names_the_device(what: str) -> None:
    assert answer(what, job()) == (DeclareLost(worker_id="w1", source="health", reason=f"{DEVICE}: why"),)


@pytest.mark.parametrize("what", ["heat", "minor xid", "heat is over", "not available"])
def test_the_rest_is_only_told(what: str) -> None:
    assert answer(what, job()) == ()


def test_each_condition_has_the_answer_of_its_own_setting() -> None:
    (drained,) = answer("heat", job(), heat="drain")
    assert isinstance(drained, RequestDrain) and (drained.worker_id, drained.deadline_s) == ("w1", 30.0)
    assert answer("lost", job(), lost="report") == ()
    assert isinstance(answer("ecc", job(), ecc="drain")[0], RequestDrain)


def test_nobody_leaves_twice_and_nobody_leaves_where_too_few_would_be_left() -> None:
    assert answer("heat", job("w1"), heat="drain") == ()
    assert answer("lost", job("w1")) == ()
    assert answer("heat", job(min_workers=3), heat="drain") == ()


def test_conditions_of_other_techniques_are_not_its_business() -> None:
    event = ConditionSeen(technique="thermal", what="heat", worker_id="w1", host="a")
    assert HealthPolicy("gpu_health", HealthSettings(heat="replace")).decide(job(), event) == ()
