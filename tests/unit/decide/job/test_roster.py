from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from craft.decide.job.observe import observe
from craft.decide.job.roster import Roster, Standing, WorkerView
from craft.decide.job.state import JobState
from craft.protocol.events import GenerationEntered, WorkerJoined
from craft.protocol.membership import Generation, Member

STANDINGS: tuple[Standing, ...] = ("waiting", "member", "lost", "finished")


def view(number: int, standing: Standing = "waiting", entered: int = 0, draining: str | None = None) -> WorkerView:
    return WorkerView(member=Member(worker_id=f"w{number}"), standing=standing, entered=entered, draining=draining)


change = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 9), st.sampled_from(STANDINGS)),
    st.tuples(st.just("replace"), st.integers(0, 9), st.sampled_from(STANDINGS)),
    st.tuples(st.just("enter"), st.integers(0, 9), st.sampled_from(STANDINGS)),
    st.tuples(st.just("drain"), st.integers(0, 9), st.sampled_from(STANDINGS)),
    st.tuples(st.just("drop"), st.integers(0, 9), st.sampled_from(STANDINGS)),
    st.tuples(st.just("back"), st.integers(0, 9), st.sampled_from(STANDINGS)),
    st.tuples(st.just("reverse"), st.integers(0, 9), st.sampled_from(STANDINGS)),
)


def after(rosters: list[Roster], what: str, number: int, standing: Standing) -> Roster:
    """A roster that comes about by one change, as they do in a job and as they never do."""
    roster = rosters[-1]
    if what == "append":
        known = {each.member.worker_id for each in roster}
        return roster if f"w{number}" in known else roster.with_appended(view(number, standing))
    if what == "replace":
        return roster.with_view(view(number, standing))
    if what == "drain":
        return roster.with_view(view(number, standing, draining="because"))
    if what == "enter":
        return Roster(view(int(each.member.worker_id[1:]), each.standing, number) for each in roster)
    if what == "drop":
        return Roster(each for each in roster if each.member.worker_id != f"w{number}")
    if what == "back":
        return rosters[number % len(rosters)]
    return Roster(roster[::-1])


def check(roster: Roster) -> None:
    asked: list[tuple[Standing, ...]] = [*((each,) for each in STANDINGS), ("waiting", "member"), STANDINGS]
    for wanted in asked:
        assert roster.having(wanted) == tuple(each for each in roster if each.standing in wanted)
    generation = Generation(number=1, nonce="x", members=tuple(each.member for each in roster[::-2]))
    members = {each.member.worker_id for each in roster if each.standing == "member"}
    for _ in range(2):
        assert roster.present(generation) == tuple(each for each in generation.worker_ids if each in members)
    draining = [each for each in roster if each.draining is not None]
    assert roster.has_leaving_members() == any(each.standing == "member" for each in draining)
    for name in range(10):
        expected = next((each for each in roster if each.member.worker_id == f"w{name}"), None)
        assert roster.find(f"w{name}") == expected


@given(st.lists(change, max_size=30))
def test_whatever_was_asked_before_the_answers_are_those_of_a_search(changes: list[tuple[str, int, Standing]]) -> None:
    rosters = [Roster()]
    for what, number, standing in changes:
        rosters.append(after(rosters, what, number, standing))
        check(rosters[-1])
    for roster in rosters:
        check(roster)


def test_one_replaced_worker_leaves_the_others_where_they_are() -> None:
    workers = Roster((view(0), view(1), view(2)))
    assert workers.with_view(view(1, "lost")) == (view(0), view(1, "lost"), view(2))
    assert workers.with_view(view(7)) is workers


def test_a_state_made_of_a_plain_tuple_has_a_roster() -> None:
    state = JobState(slots=2, workers=(view(0), view(1, "lost")))
    assert state.view("w1") == view(1, "lost") and state.having("waiting") == (view(0),)


def test_thousands_of_workers_join_and_enter_in_a_moment() -> None:
    # A search per event would take a minute or more; the limit is far from both, however slow the machine.
    began = time.perf_counter()
    state = JobState(slots=8000)
    for number in range(8000):
        state = observe(state, WorkerJoined(member=Member(worker_id=f"w{number}"), pid=1))
    for number in range(8000):
        state = observe(state, GenerationEntered(worker_id=f"w{number}", generation=1))
    assert {each.entered for each in state.workers} == {1}
    assert time.perf_counter() - began < 20.0
