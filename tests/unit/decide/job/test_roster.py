from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from craft.decide.job.observe import observe
from craft.decide.job.roster import find, having, leaving, present, replaced
from craft.decide.job.state import JobState, Standing, WorkerView
from craft.protocol.events import GenerationEntered, WorkerJoined
from craft.protocol.membership import Generation, Member

Workers = tuple[WorkerView, ...]
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


def after(tuples: list[Workers], what: str, number: int, standing: Standing) -> Workers:
    """A tuple of workers that comes about by one change, as they do in a job and as they never do."""
    workers = tuples[-1]
    if what == "append":
        known = {each.member.worker_id for each in workers}
        return workers if f"w{number}" in known else (*workers, view(number, standing))
    if what == "replace":
        return replaced(workers, view(number, standing))
    if what == "drain":
        return replaced(workers, view(number, standing, draining="because"))
    if what == "enter":
        return tuple(view(int(each.member.worker_id[1:]), each.standing, number) for each in workers)
    if what == "drop":
        return tuple(each for each in workers if each.member.worker_id != f"w{number}")
    if what == "back":
        return tuples[number % len(tuples)]
    return workers[::-1]


@given(st.lists(change, max_size=30))
def test_whatever_was_asked_before_the_answers_are_those_of_a_search(changes: list[tuple[str, int, Standing]]) -> None:
    tuples: list[Workers] = [()]
    for what, number, standing in changes:
        workers = after(tuples, what, number, standing)
        tuples.append(workers)
        for wanted in (*((each,) for each in STANDINGS), ("waiting", "member"), STANDINGS):
            assert having(workers, wanted) == tuple(each for each in workers if each.standing in wanted)
        generation = Generation(number=1, nonce="x", members=tuple(each.member for each in workers[::-2]))
        members = {each.member.worker_id for each in workers if each.standing == "member"}
        for _ in range(2):
            expected_ids = tuple(each for each in generation.worker_ids if each in members)
            assert present(workers, generation) == expected_ids
        draining = [each for each in workers if each.draining is not None]
        assert leaving(workers) == any(each.standing == "member" for each in draining)
        for name in range(10):
            expected = next((each for each in workers if each.member.worker_id == f"w{name}"), None)
            assert find(workers, f"w{name}") == expected


def test_one_replaced_worker_leaves_the_others_where_they_are() -> None:
    workers = (view(0), view(1), view(2))
    assert replaced(workers, view(1, "lost")) == (view(0), view(1, "lost"), view(2))
    assert replaced(workers, view(7)) == workers


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
