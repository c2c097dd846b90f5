from __future__ import annotations

import pytest
from msgspec.structs import replace

from craft.decide.job.apply import apply
from craft.decide.job.observe import observe
from craft.decide.job.state import JobState
from craft.decide.policies.broken import MOST_RETRIES, BrokenPolicy
from craft.decide.policies.loss import LossPolicy
from craft.decide.policies.membership import JoinPolicy
from craft.decide.policies.policy import EXIT_BUG, EXIT_FINISHED, EXIT_GIVEN_UP, Policy, decide
from craft.decide.techniques import defaults
from craft.protocol.actions import AnyAction, DeclareLost, Fence, Hold, Propose, Reconfigure, Stop, Watch
from craft.protocol.events import (
    AnyEvent,
    ExchangeBroken,
    GenerationEntered,
    GenerationStuck,
    HoldExpired,
    HostLost,
    ReplacementsEnded,
    WorkerFailed,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
    WorkerOverdue,
)
from craft.protocol.membership import Member

POLICIES = defaults().policies()


def told(state: JobState, *events: AnyEvent) -> tuple[JobState, tuple[AnyAction, ...]]:
    """The state after ``events``, and what the last of them led to."""
    actions: tuple[AnyAction, ...] = ()
    for event in events:
        state = observe(state, event)
        actions = decide(POLICIES, state, event)
        for action in actions:
            state = apply(state, action, "n")
    return state, actions


def formed(*names: str, min_workers: int = 1) -> JobState:
    state = JobState(slots=len(names), min_workers=min_workers)
    state, _ = told(state, *(WorkerJoined(member=Member(worker_id=name, host=f"h{name}")) for name in names))
    return state


def joined(name: str) -> WorkerJoined:
    return WorkerJoined(member=Member(worker_id=name, host=f"h{name}"))


def lost(name: str, source: str = "agent") -> WorkerLost:
    return WorkerLost(worker_id=name, reason="killed", source=source)


def failed(name: str, step: int | None, microbatch: int | None = None) -> WorkerFailed:
    return WorkerFailed(worker_id=name, error="E", traceback="T", step=step, microbatch=microbatch)


def entered(generation: int, *names: str) -> list[GenerationEntered]:
    return [GenerationEntered(worker_id=name, generation=generation) for name in names]


def kinds(actions: tuple[AnyAction, ...]) -> list[type[AnyAction]]:
    return [type(action) for action in actions]


class _Always:
    def __init__(self, reason: str) -> None:
        self._stop = Stop(reason=reason, exit_code=9)

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        return (self._stop,)


def test_the_first_policy_that_answers_wins() -> None:
    """P8: a declared order, and nothing else, decides between techniques."""
    policies: tuple[Policy, ...] = (BrokenPolicy(), _Always("first"), _Always("second"))

    assert decide(policies, formed("a"), lost("x"))[0].reason == "first"


def test_nothing_is_decided_once_the_job_stops() -> None:
    state = apply(formed("a", "b"), Stop(reason="r", exit_code=0), "n")

    assert decide(POLICIES, state, lost("a")) == ()


def test_survivors_of_a_loss_go_on_in_the_order_of_their_ranks() -> None:
    """P1: no spare is needed."""
    _, actions = told(formed("a", "b", "c"), lost("a"))

    assert kinds(actions) == [Reconfigure]
    assert isinstance(actions[0], Reconfigure) and actions[0].members == ("b", "c")


@pytest.mark.parametrize("source", ["heartbeat", "api", "peers"])
def test_a_worker_that_may_still_run_is_fenced_first(source: str) -> None:
    """P3: it must not act under the old generation."""
    _, actions = told(formed("a", "b"), lost("b", source))

    assert kinds(actions) == [Fence, Reconfigure]


def test_the_answer_says_what_happens_to_the_microbatches() -> None:
    state = observe(formed("a", "b"), lost("b"))

    assert "redo" in LossPolicy("redo").decide(state, lost("b"))[0].reason
    assert "drop" in LossPolicy("shrink").decide(state, lost("b"))[0].reason


def test_a_host_is_lost_in_one_generation_change() -> None:
    """P5"""
    state, actions = told(formed("a", "b", "c"), HostLost(host="hb", reason="silent"))

    assert kinds(actions) == [Reconfigure]
    assert state.members == ("a", "c")


def test_below_the_least_number_of_workers_the_job_gives_up_if_nobody_can_come() -> None:
    _, actions = told(
        formed("a", "b", min_workers=2),
        *(ReplacementsEnded(host=host, reason="enough") for host in ("ha", "hb")),
        lost("b"),
    )

    assert isinstance(actions[0], Stop) and actions[0].exit_code == EXIT_GIVEN_UP


def test_below_the_least_number_of_workers_the_job_waits_for_who_can_come() -> None:
    state, actions = told(formed("a", "b", min_workers=2), lost("b"))
    assert kinds(actions) == [Hold] and state.holding == 1

    came, actions = told(state, joined("c"))
    assert isinstance(actions[0], Reconfigure) and actions[0].members == ("a", "c")
    assert came.holding == 0

    _, actions = told(state, HoldExpired(generation=1))
    assert isinstance(actions[0], Stop) and actions[0].exit_code == EXIT_GIVEN_UP


def test_once_somebody_finished_the_least_number_does_not_matter() -> None:
    """P1: the others only commit what they hold."""
    state, _ = told(formed("a", "b", "c", min_workers=3), *entered(1, "a", "b", "c"), WorkerFinished(worker_id="a"))

    assert kinds(told(state, lost("b"))[1]) == [Reconfigure]


def test_a_failure_before_the_first_step_is_a_bug() -> None:
    _, actions = told(formed("a", "b"), failed("a", None))

    assert isinstance(actions[0], Stop)
    assert (actions[0].exit_code, actions[0].traceback) == (EXIT_BUG, "T")


def test_a_failure_of_the_same_microbatch_on_another_worker_is_a_bug() -> None:
    state, first = told(formed("a", "b", "c"), failed("a", 4, 1))
    _, other = told(state, failed("b", 4, 2))
    _, again = told(state, failed("b", 4, 1))

    assert kinds(first) == kinds(other) == [Reconfigure]
    assert isinstance(again[0], Stop) and again[0].exit_code == EXIT_BUG


def test_a_device_that_fails_is_never_taken_for_a_bug() -> None:
    """The same microbatch may fail on a second bad device; the script has nothing to do with it."""
    broken = [replace(failed(name, 4, 1), hardware=True) for name in ("a", "b")]
    state, first = told(formed("a", "b", "c"), broken[0])
    state, second = told(state, broken[1])

    assert kinds(first) == kinds(second) == [Reconfigure]


def test_a_failure_on_the_last_worker_is_a_bug() -> None:
    assert kinds(told(formed("a"), failed("a", 4, 1))[1]) == [Stop]


def test_a_spare_that_waits_does_not_keep_a_finished_job_open() -> None:
    state, _ = told(formed("a"), WorkerJoined(member=Member(worker_id="spare")), *entered(1, "a"))

    _, actions = told(state, WorkerFinished(worker_id="a"))

    assert isinstance(actions[0], Stop) and actions[0].exit_code == EXIT_FINISHED


def test_workers_that_finish_with_different_states_have_not_finished_well() -> None:
    """P1: whatever the cause, nobody is to take such weights for good ones."""
    state, _ = told(formed("a", "b", "c"), *entered(1, "a", "b", "c"))
    digests = {"a": "one", "b": "one", "c": "another"}

    _, actions = told(state, *(WorkerFinished(worker_id=each, digest=digest) for each, digest in digests.items()))

    (stop,) = actions
    assert isinstance(stop, Stop) and stop.exit_code == EXIT_BUG
    assert "finished with different states (a, b | c)" in stop.reason


def test_one_that_finished_before_it_heard_of_a_generation_is_not_waited_for_in_it() -> None:
    """P1: the other holds the last result, and commits it in a generation without the one that ended."""
    state, _ = told(formed("a", "b", "c"), *entered(1, "a", "b", "c"), lost("c"))

    state, actions = told(state, WorkerFinished(worker_id="a"))

    assert kinds(actions) == [Reconfigure]
    assert state.members == ("b",)


def test_one_that_finished_in_the_current_generation_is_not_missed() -> None:
    _, actions = told(formed("a", "b"), *entered(1, "a", "b"), WorkerFinished(worker_id="a"))

    assert actions == ()


def test_one_that_ends_before_all_steps_are_done_is_a_loss() -> None:
    _, actions = told(formed("a", "b"), *entered(1, "a", "b"), WorkerFinished(worker_id="a", complete=False))

    assert kinds(actions) == [Reconfigure]


def test_the_first_to_end_before_anything_began_does_not_end_the_job() -> None:
    _, actions = told(JobState(slots=2), WorkerFinished(worker_id="a"))

    assert actions == ()


def test_a_broken_exchange_is_looked_at_again_before_anything_is_done() -> None:
    """P5: a death would show within moments."""
    state, actions = told(formed("a", "b"), ExchangeBroken(worker_id="a", generation=1))
    assert kinds(actions) == [Watch]

    _, actions = told(state, GenerationStuck(generation=1))
    assert isinstance(actions[0], Reconfigure) and actions[0].members == ("a", "b")


def in_vain(state: JobState, *missed: tuple[str, str], step: int = 30) -> tuple[JobState, tuple[AnyAction, ...]]:
    """The same members meet again as often as that is done, and commit nothing."""
    actions: tuple[AnyAction, ...] = ()
    for _ in range(MOST_RETRIES + 1):
        assert state.generation is not None
        number = state.generation.number
        broken = [
            ExchangeBroken(worker_id=by, generation=number, missed=(about,), progress=(0, step, 0))
            for by, about in missed
        ]
        broken = broken or [ExchangeBroken(worker_id=state.members[0], generation=number, progress=(0, step, 0))]
        state, actions = told(state, *broken, GenerationStuck(generation=number))
    return state, actions


@pytest.mark.parametrize(
    ("missed", "who"),
    [
        ((("b", "a"), ("c", "a")), "a"),
        ((("a", "a"), ("b", "a"), ("c", "b")), "a"),
        ((("a", "c"), ("b", "b")), "b"),
        ((("a", "b"), ("b", "a")), "b"),
        ((("a", "b"), ("b", "b"), ("a", "c"), ("c", "c")), "c"),
    ],
)
def test_same_members_that_meet_in_vain_go_on_without_the_one_in_the_way(
    missed: tuple[tuple[str, str], ...], who: str
) -> None:
    _, actions = in_vain(formed("a", "b", "c"), *missed)

    (declared,) = actions
    assert isinstance(declared, DeclareLost) and (declared.worker_id, declared.source) == (who, "peers")
    assert "met 4 times again in vain" in declared.reason


def test_what_broke_an_earlier_generation_and_passed_does_not_put_a_worker_in_the_way() -> None:
    """With both counted alike, c would be replaced, and with two members the job would end."""
    for names in (("a", "b", "c"), ("a", "c")):
        state = formed(*names)
        once = [ExchangeBroken(worker_id=each, generation=1, missed=("c",), progress=(0, 30, 0)) for each in names]
        state, _ = told(state, *once, GenerationStuck(generation=1))
        for _ in range(MOST_RETRIES):
            assert state.generation is not None
            number = state.generation.number
            broken = [ExchangeBroken(worker_id=each, generation=number, missed=("a",)) for each in names]
            state, actions = told(state, *broken, GenerationStuck(generation=number))
        assert [each.worker_id for each in actions if isinstance(each, DeclareLost)] == ["a"]


@pytest.mark.parametrize(
    ("missed", "sentence"),
    [
        ((), "no member could say which other one it did not meet"),
        ((("a", "b"), ("b", "a")), "a did not meet b; b did not meet a"),
    ],
)
def test_same_members_that_meet_in_vain_end_the_job_where_it_cannot_be_told_why(
    missed: tuple[tuple[str, str], ...], sentence: str
) -> None:
    _, actions = in_vain(formed("a", "b"), *missed)

    (stop,) = actions
    assert isinstance(stop, Stop) and stop.exit_code == 3 and sentence in stop.reason


def test_workers_are_not_replaced_for_ever_while_nothing_is_committed() -> None:
    state = formed("a", "b", "c", "d", "e", "f")
    for who in ("f", "e", "d"):
        state, actions = in_vain(state, ("a", who), ("b", who))
        assert [action for action in actions if isinstance(action, DeclareLost) and action.worker_id == who]
        state, _ = told(state, WorkerLost(worker_id=who, reason="in the way", source="peers", step=30))

    _, actions = in_vain(state, ("a", "c"), ("b", "c"))
    assert kinds(actions) == [Stop]
    _, actions = in_vain(state, ("a", "c"), ("b", "c"), step=31)
    assert kinds(actions) == [DeclareLost]


def test_a_step_in_between_makes_meeting_again_worth_it() -> None:
    state = formed("a", "b")
    for step in range(20):
        assert state.generation is not None
        number = state.generation.number
        broken = ExchangeBroken(worker_id="a", generation=number, progress=(0, step, 0))
        state, actions = told(state, broken, GenerationStuck(generation=number))
        assert kinds(actions) == [Reconfigure]


def test_a_call_that_all_wait_in_is_not_tried_for_ever() -> None:
    state = formed("a", "b")
    seen = []
    for number in range(1, MOST_RETRIES + 2):
        overdue = WorkerOverdue(
            worker_id="a", phase="calling", step=3, elapsed_s=9, limit_s=9, detail="", waiting=("b",)
        )
        both = [GenerationEntered(worker_id=each, generation=number, progress=(0, 3, 1)) for each in ("a", "b")]
        state, actions = told(state, *both, overdue)
        seen += kinds(actions)

    assert seen == [Reconfigure] * MOST_RETRIES + [Stop]


def test_a_broken_exchange_of_an_old_generation_is_no_news() -> None:
    state, _ = told(formed("a", "b", "c"), lost("c"))

    assert told(state, ExchangeBroken(worker_id="a", generation=1))[1] == ()
    assert told(state, GenerationStuck(generation=1))[1] == ()


def test_a_joiner_is_proposed_when_a_slot_is_free_and_all_are_in_the_current_generation() -> None:
    """P4: members go on while it is prepared."""
    join = WorkerJoined(member=Member(worker_id="j"))
    state, actions = told(formed("a", "b", "c"), lost("c"), join, *entered(2, "a"))
    assert actions == ()

    _, actions = told(state, *entered(2, "b"))
    assert isinstance(actions[0], Propose) and actions[0].members == ("a", "b", "j")


def test_a_proposal_is_not_replaced_by_another() -> None:
    """P3: its members may be entering it, and the lighthouse must know under what they act."""
    joins = [WorkerJoined(member=Member(worker_id=name)) for name in ("j", "k")]
    state, _ = told(formed("a", "b", "c"), lost("b"), lost("c"), *entered(3, "a"), joins[0])
    assert state.upcoming is not None

    assert told(state, joins[1])[1] == ()


def test_no_slot_is_given_away_twice() -> None:
    state, actions = told(formed("a", "b"), *entered(1, "a", "b"), WorkerJoined(member=Member(worker_id="j")))

    assert actions == ()
    assert JoinPolicy().decide(state, GenerationEntered(worker_id="a", generation=1)) == ()


def test_the_death_of_a_joiner_that_was_proposed_brings_the_members_back_together() -> None:
    """P5: they may wait for it in the proposed generation."""
    join = WorkerJoined(member=Member(worker_id="j"))
    state, _ = told(formed("a", "b"), lost("b"), *entered(2, "a"), join)

    state, actions = told(state, lost("j"))

    assert kinds(actions) == [Reconfigure]
    assert state.members == ("a",) and state.upcoming is None


def test_of_guests_nobody_says_that_they_redo_anything() -> None:
    state = JobState(slots=3, min_workers=1)
    state, _ = told(state, *(WorkerJoined(member=Member(worker_id=name, guest=True)) for name in "abc"))
    state, (action,) = told(state, lost("b"))
    assert action.reason == "b lost (killed): 2 survivors are told"
    _, (action,) = told(state, lost("a"))
    assert action.reason == "a lost (killed): 1 survivor is told"
