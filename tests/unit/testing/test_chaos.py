"""What ``craft chaos`` does next: the same seed gives the same kinds, and somebody always keeps the training state."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from craft.protocol.errors import ConfigError
from craft.protocol.values.injections import KINDS
from craft.testing.chaos import (
    SETTLE_S,
    ChaosFault,
    Chooser,
    NotNow,
    Planned,
    draw_plan,
    parse_duration,
    parse_kinds,
    parse_schedule,
    possible,
)


def status(workers: dict[str, str], *, step: int = 50, **more: Any) -> dict[str, Any]:
    """The status of a job; ``workers`` maps ids, whose first letter is their host, to their states."""
    return {
        "state": "running",
        "step": step,
        "slots": len(workers),
        "settled": True,
        "lighthouse": {"pid": 1, "url": ""},
        "agents": [{"host": host, "connected": True} for host in sorted({name[0] for name in workers})],
        "workers": [
            {"worker_id": name, "host": name[0], "state": state, "step": step if state == "member" else 0}
            for name, state in workers.items()
        ],
        **more,
    }


MEMBERS = dict.fromkeys(("a0", "a1", "b0", "b1"), "member")


def ready(workers: dict[str, str], seed: int = 0, **more: Any) -> Chooser:
    """A chooser that has watched the job for long enough."""
    chooser = Chooser(seed)
    for now in (0.0, SETTLE_S):
        chooser.see(status(workers, **more), now)
    return chooser


def inject(chooser: Chooser, kind: str, victim: str | None = None) -> ChaosFault:
    fault = chooser.choose(kind, victim)
    assert isinstance(fault, ChaosFault), fault
    chooser.injected(fault)
    return fault


@pytest.mark.parametrize(
    ("text", "seconds"), [("5s", 5), ("500ms", 0.5), ("2m", 120), ("1h", 3600), ("1.5s", 1.5), ("7", 7)]
)
def test_times_are_written_with_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-5s", "5 parsecs", "1e3s", "nan"])
def test_what_is_no_time_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="not a time"):
        parse_duration(text)


def test_a_schedule_is_taken_in_the_order_of_time() -> None:
    assert parse_schedule("20s:stop, 10s:kill w1,1m:kill-lighthouse") == (
        Planned(at_s=10, kind="kill", victim="w1"),
        Planned(at_s=20, kind="stop"),
        Planned(at_s=60, kind="kill-lighthouse"),
    )


@pytest.mark.parametrize("text", ["", "10s", "10s:", "10s:melt", "soon:kill", "1s:kill a b", "1s:kill-lighthouse w1"])
def test_a_schedule_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_schedule(text)


def test_an_unknown_kind_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="kill-lighthouse"):
        parse_kinds("kill,melt")
    with pytest.raises(ConfigError):
        parse_kinds(" , ")


def test_a_job_of_one_host_is_not_robbed_of_its_agent_nor_one_worker_of_itself() -> None:
    assert "kill-agent" not in possible(KINDS, slots=4, hosts=1)
    assert possible(KINDS, slots=4, hosts=2) == KINDS
    assert possible(KINDS, slots=1, hosts=1) == ("kill-lighthouse",)


@given(st.integers(), st.lists(st.sampled_from(KINDS), min_size=1))
def test_the_same_seed_gives_the_same_kinds_at_the_same_times(seed: int, kinds: list[str]) -> None:
    first, again = ([*itertools.islice(draw_plan(kinds, 5.0, seed), 20)] for _ in range(2))
    assert first == again
    assert [planned.at_s for planned in first] == sorted(planned.at_s for planned in first)
    assert {planned.kind for planned in first} <= set(kinds)


def test_the_mean_time_between_faults_is_what_was_asked_for() -> None:
    last = next(itertools.islice(draw_plan(KINDS, 5.0, 0), 9999, None))
    assert last.at_s == pytest.approx(50_000, rel=0.05)


@pytest.mark.parametrize("kind", ["kill", "stop", "hang", "raise", "slow", "cut"])
def test_the_last_holder_of_the_state_is_left_alone(kind: str) -> None:
    chooser = ready(dict.fromkeys(("a0", "a1"), "member"))
    inject(chooser, "kill", "a0")
    assert isinstance(chooser.choose(kind), NotNow)
    assert isinstance(chooser.choose(kind, "a1"), NotNow)


def test_a_worker_that_came_just_now_does_not_count_as_a_holder() -> None:
    chooser = ready({"a0": "member", "a1": "starting"})
    assert isinstance(chooser.choose("kill", "a0"), NotNow)
    chooser.see(status({"a0": "member", "a1": "member"}), SETTLE_S + 1)
    assert isinstance(chooser.choose("kill", "a0"), NotNow)
    chooser.see(status({"a0": "member", "a1": "member"}), 2 * SETTLE_S + 1)
    assert isinstance(chooser.choose("kill", "a0"), ChaosFault)


def test_an_agent_is_killed_only_if_another_host_has_the_state() -> None:
    assert inject(ready(MEMBERS), "kill-agent", "b") == ChaosFault(kind="kill-agent", host="b")
    chooser = ready({"a0": "member", "a1": "member", "b0": "waiting"})
    assert isinstance(chooser.choose("kill-agent", "a"), NotNow)
    assert isinstance(chooser.choose("kill-agent", "b"), ChaosFault)


def test_an_agent_is_left_alone_while_the_only_other_holder_is_dying() -> None:
    chooser = ready({"a0": "member", "b0": "member", "b1": "member"})
    inject(chooser, "hang", "a0")
    assert isinstance(chooser.choose("kill-agent", "b"), NotNow)
    assert isinstance(chooser.choose("kill-agent", "a"), ChaosFault)


def test_a_fault_is_over_when_the_job_goes_on_without_its_victim() -> None:
    chooser = ready(dict.fromkeys(("a0", "a1"), "member"))
    inject(chooser, "kill", "a0")
    after = {"a0": "lost", "a1": "member", "a2": "member"}
    for now, settled, step, over in [(2, False, 50, False), (3, True, 50, False), (5, True, 51, True)]:
        chooser.see(status(after, settled=settled, step=step), now)
        assert chooser.recovered == over
    assert isinstance(chooser.choose("kill", "a1"), ChaosFault)


def test_two_exceptions_are_never_in_one_step() -> None:
    chooser = ready(MEMBERS)
    inject(chooser, "raise", "a0")
    assert isinstance(chooser.choose("raise"), NotNow)
    after = {**MEMBERS, "a0": "lost"}
    for now, step in [(2, 50), (3, 51)]:
        chooser.see(status(after, step=step), now)
        assert isinstance(chooser.choose("raise"), NotNow)
    chooser.see(status(after, step=52), 4)
    assert isinstance(chooser.choose("raise"), ChaosFault)


def test_who_was_drained_is_not_replaced_so_a_job_is_not_drained_away() -> None:
    chooser = ready(MEMBERS)
    inject(chooser, "drain", "a0")
    chooser.see(status({**MEMBERS, "a0": "left"}), 3)
    inject(chooser, "drain", "a1")
    chooser.see(status({**MEMBERS, "a0": "left", "a1": "left"}), 5)
    assert isinstance(chooser.choose("drain"), NotNow)


def test_the_lighthouse_is_killed_again_only_after_another_one_has_taken_over() -> None:
    chooser = ready(MEMBERS)
    inject(chooser, "kill-lighthouse")
    assert isinstance(chooser.choose("kill-lighthouse"), NotNow)
    chooser.see(status(MEMBERS), 2)
    assert isinstance(chooser.choose("kill-lighthouse"), NotNow)
    chooser.see(status(MEMBERS, lighthouse={"pid": 2, "url": ""}), 3)
    assert isinstance(chooser.choose("kill-lighthouse"), ChaosFault)


def test_nothing_is_chosen_while_the_job_forms_or_ends() -> None:
    for state in ("forming", "stopping", "finished", "failed"):
        assert isinstance(ready(MEMBERS, state=state).choose("kill-lighthouse"), NotNow)


@given(
    st.integers(0, 1000),
    st.lists(st.sampled_from([*KINDS, "time passes", "they die", "others come"]), max_size=40),
)
def test_whatever_happens_somebody_who_was_never_hit_has_the_state(seed: int, story: list[str]) -> None:
    """Victims die, or linger, in any order; others come and take their places; one that is whole is always left."""
    chooser, now, fresh = ready(MEMBERS, seed), SETTLE_S, 10
    workers = dict(MEMBERS)
    doomed: set[str] = set()
    since = dict.fromkeys(MEMBERS, 0.0)
    for what in story:
        now += SETTLE_S / 2
        if what == "time passes":
            now += 2 * SETTLE_S
        elif what == "they die":
            workers.update(dict.fromkeys(doomed, "lost"))
        elif what == "others come" and sum(state == "member" for state in workers.values()) < 4:
            name = f"{'ab'[fresh % 2]}{fresh}"
            workers[name], since[name], fresh = "member", now, fresh + 1
        chooser.see(status(workers, step=50 + int(10 * now)), now)
        if what in KINDS:
            found = chooser.choose(what)
            if isinstance(found, ChaosFault):
                chooser.injected(found)
            # Who is slow or cut off for a moment keeps the state.
            if isinstance(found, ChaosFault) and what not in ("slow", "cut"):
                doomed |= {name for name in workers if name in (found.worker_id,) or name[0] == found.host}
        holders = {name for name, state in workers.items() if state == "member" and now - since[name] >= SETTLE_S / 2}
        assert holders - doomed


def sharded(**replicas: int) -> dict[str, Any]:
    """The status of a job of replicas of two workers; by worker, its replica."""
    found = status(dict.fromkeys(replicas, "member"), replica_size=2)
    for worker in found["workers"]:
        worker["replica"], worker["position"] = replicas[worker["worker_id"]], int(worker["worker_id"][1])
    return found


def test_a_complete_replica_is_left_alone() -> None:
    chooser = Chooser(1)
    for now in (0.0, SETTLE_S):
        chooser.see(sharded(a0=0, a1=0, b0=1, b1=1), now)
    assert isinstance(chooser.choose("drain"), NotNow), "one replica would be left"
    inject(chooser, "kill", "a1")

    assert chooser.choose("kill", "b0") == NotNow(reason="no other worker has the training state for certain")
    assert isinstance(chooser.choose("kill", "a0"), ChaosFault), "b0 has the same"


def test_a_job_of_one_replica_survives_no_fault_of_a_worker() -> None:
    assert possible(("kill", "kill-lighthouse"), slots=2, hosts=1, replica_size=2) == ("kill-lighthouse",)
