from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from craft.decide.job.apply import apply, restarted
from craft.decide.job.observe import observe
from craft.decide.job.state import JobState
from craft.protocol.actions import Fence, Propose, Reconfigure, Stop, Watch
from craft.protocol.events import (
    AnyEvent,
    ExchangeBroken,
    GenerationEntered,
    HostLost,
    WorkerFailed,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from craft.protocol.membership import Member


def joined(*names: str, slots: int = 3) -> JobState:
    state = JobState(slots=slots)
    for name in names:
        state = observe(state, WorkerJoined(member=Member(worker_id=name)))
    return state


def formed(*names: str) -> JobState:
    return apply(joined(*names), Reconfigure(members=names, reason="all joined"), "n")


def standings(state: JobState) -> dict[str, str]:
    return {view.member.worker_id: view.standing for view in state.workers}


names = st.sampled_from(["a", "b", "c", "d"])
events: st.SearchStrategy[AnyEvent] = st.one_of(
    st.builds(WorkerJoined, member=st.builds(Member, worker_id=names, host=st.just("h"))),
    st.builds(WorkerLost, worker_id=names, reason=st.just("killed"), source=st.sampled_from(["agent", "peers"])),
    st.builds(WorkerFailed, worker_id=names, error=st.just("e"), traceback=st.just("t"), step=st.just(1)),
    st.builds(WorkerFinished, worker_id=names),
    st.builds(HostLost, host=st.just("h"), reason=st.just("silent")),
    st.builds(
        ExchangeBroken,
        worker_id=names,
        generation=st.integers(0, 3),
        missed=st.lists(names, max_size=2).map(tuple),
        progress=st.tuples(st.just(0), st.integers(0, 2)),
    ),
    st.builds(GenerationEntered, worker_id=names, generation=st.integers(0, 3)),
)


@given(st.lists(events, max_size=8), events)
def test_a_repeated_event_changes_nothing(before: list[AnyEvent], event: AnyEvent) -> None:
    state = formed("a", "b", "c")
    for earlier in before:
        state = observe(state, earlier)
    once = observe(state, event)

    assert observe(once, event) == once


@given(st.lists(events, max_size=12))
def test_who_is_lost_or_finished_stays_so(happened: list[AnyEvent]) -> None:
    """P3: a worker's name is never used again."""
    state = formed("a", "b", "c")
    for event in happened:
        after = observe(state, event)
        for view in state.having("lost", "finished"):
            later = after.view(view.member.worker_id)
            assert later is not None and later.standing == view.standing
        state = after


def test_a_generation_number_is_above_every_number_heard_of() -> None:
    """P3: numbers only grow."""
    state = observe(formed("a", "b"), GenerationEntered(worker_id="a", generation=9))

    state = apply(state, Reconfigure(members=("a", "b"), reason="r"), "m")

    assert state.generation is not None and state.generation.name == "10-m"


def test_a_proposal_that_is_withdrawn_does_not_give_its_number_back() -> None:
    """P3: somebody may have entered it."""
    state = apply(formed("a", "b"), Propose(members=("a", "b"), reason="r"), "m")

    state = apply(state, Reconfigure(members=("a",), reason="r"), "k")

    assert state.upcoming is None
    assert state.generation is not None and state.generation.number == 3


def test_founders_are_members_from_the_first_generation_on_and_joiners_from_theirs() -> None:
    """P3: so that a worker knows whether what it has is the state of the job."""
    state = observe(formed("a", "b"), WorkerJoined(member=Member(worker_id="j")))
    state = apply(state, Propose(members=("a", "b", "j"), reason="r"), "m")
    state = observe(state, GenerationEntered(worker_id="a", generation=2))
    state = apply(state, Reconfigure(members=("a", "j"), reason="r"), "k")

    assert state.generation is not None
    assert [(member.worker_id, member.since) for member in state.generation.members] == [("a", 0), ("j", 2)]


def test_who_is_left_out_and_comes_back_is_a_member_only_from_then_on() -> None:
    """P3: the others went on without it."""
    state = observe(formed("a", "b"), WorkerJoined(member=Member(worker_id="j")))
    state = apply(state, Propose(members=("a", "b", "j"), reason="r"), "m")
    state = apply(state, Reconfigure(members=("a",), reason="b lost"), "k")

    state = apply(state, Propose(members=("a", "j"), reason="r"), "l")

    assert state.upcoming is not None and state.upcoming.members[1].since == 4


def test_one_that_entered_the_upcoming_generation_makes_it_the_current_one() -> None:
    state = observe(formed("a"), WorkerJoined(member=Member(worker_id="j")))
    state = apply(state, Propose(members=("a", "j"), reason="r"), "m")

    state = observe(state, GenerationEntered(worker_id="a", generation=2))

    assert state.upcoming is None
    assert state.members == ("a", "j")


def test_members_are_in_the_order_of_ranks_without_those_that_are_gone() -> None:
    state = observe(formed("c", "a", "b"), WorkerFinished(worker_id="a"))

    assert state.members == ("c", "b")


def test_whoever_ends_before_the_first_generation_is_not_waited_for() -> None:
    state = observe(joined("a"), WorkerLost(worker_id="a", reason="killed"))
    state = observe(state, WorkerLost(worker_id="b", reason="killed"))
    state = observe(state, WorkerFinished(worker_id="c"))

    assert state.absent == 3
    assert standings(state) == {"a": "lost", "b": "lost", "c": "finished"}


def test_a_fenced_worker_is_lost_and_a_watched_generation_changes_nothing() -> None:
    state = formed("a", "b")

    assert standings(apply(state, Fence(worker_id="b", reason="r"), "n"))["b"] == "lost"
    assert apply(state, Watch(generation=1, reason="r"), "n") == state


def test_the_first_reason_to_stop_is_kept() -> None:
    first, second = Stop(reason="bug", exit_code=1), Stop(reason="later", exit_code=0)

    assert apply(apply(formed("a"), first, "n"), second, "n").stopping == first


def test_a_restarted_lighthouse_knows_the_durable_generation_and_never_uses_its_number_again() -> None:
    """P3"""
    before = formed("a", "b")

    state = restarted(before, before.generation)

    assert (state.generation, state.highest, state.recovering) == (before.generation, 1, True)
    assert standings(state) == {"a": "member", "b": "member"}


def test_a_restarted_lighthouse_has_recovered_when_every_member_reports_the_generation() -> None:
    state = restarted(formed("a", "b"), formed("a", "b").generation)

    state = observe(state, GenerationEntered(worker_id="a", generation=1))
    assert state.recovering

    state = observe(state, GenerationEntered(worker_id="b", generation=1))
    assert not state.recovering


def test_a_member_that_is_lost_is_not_waited_for_in_recovery() -> None:
    state = restarted(formed("a", "b"), formed("a", "b").generation)
    state = observe(state, WorkerLost(worker_id="b", reason="killed"))

    assert not observe(state, GenerationEntered(worker_id="a", generation=1)).recovering


def test_a_lighthouse_that_had_made_nothing_durable_begins_anew() -> None:
    assert restarted(joined("a", slots=2), None) == JobState(slots=2)
