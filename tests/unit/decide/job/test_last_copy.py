"""Whom a job counts on: who has the state, who may come, and when the last one is gone. Each was found by the simulation."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from craft.control.core.persistence import durable_of, restore
from craft.decide.job.apply import apply
from craft.decide.job.last_copy import awaiting, holders
from craft.decide.job.observe import observe
from craft.decide.job.state import JobState
from craft.decide.policies.loss import LossPolicy
from craft.decide.policies.membership import JoinPolicy
from craft.decide.policies.policy import EXIT_FINISHED, Policy, decide
from craft.decide.policies.requests import DrainPolicy
from craft.decide.techniques import defaults
from craft.protocol.actions import Reconfigure, Restore, Stop
from craft.protocol.events import (
    AnyEvent,
    CheckpointWritten,
    DrainRequested,
    ExchangeBroken,
    GenerationEntered,
    HostSilent,
    LoopEnded,
    ReplacementsEnded,
    ScriptEnded,
    WorkerCaughtUp,
    WorkerFinished,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)
from craft.protocol.membership import Member

POLICIES = defaults().policies()
WAITING = (LossPolicy("wait"), JoinPolicy(), DrainPolicy())


def after(state: JobState, *events: AnyEvent, policies: Sequence[Policy] = POLICIES) -> JobState:
    """The state once these have happened, and whatever was decided about each is done."""
    for event in events:
        state = observe(state, event)
        for action in decide(policies, state, event):
            state = apply(state, action, "x")
    return state


def joined(worker_id: str, host: str = "h0", late: bool = False) -> WorkerJoined:
    return WorkerJoined(member=Member(worker_id=worker_id, host=host, late=late))


def entered(worker_id: str, generation: int, behind: bool = False) -> GenerationEntered:
    return GenerationEntered(worker_id=worker_id, generation=generation, behind=behind)


def lost(worker_id: str) -> WorkerLost:
    return WorkerLost(worker_id=worker_id, reason="killed", step=3)


def training(*worker_ids: str, hosts: tuple[str, ...] = ()) -> JobState:
    hosts = hosts or ("h0",) * len(worker_ids)
    state = after(JobState(slots=len(worker_ids)), *map(joined, worker_ids, hosts))
    return after(state, *(entered(each, 1) for each in worker_ids))


def test_after_a_restart_one_that_came_later_has_the_state_only_when_it_says_so() -> None:
    state = after(training("w0", "w1"), lost("w1"), entered("w0", 2), joined("w2", late=True))
    assert state.upcoming is not None
    again = restore(JobState(slots=2), durable_of(state))
    again = after(again, entered("w0", 3))
    assert holders(again) == {"w0"}
    assert holders(after(again, entered("w2", 3, behind=True))) == {"w0"}
    assert holders(after(again, entered("w2", 3, behind=True), WorkerCaughtUp(worker_id="w2"))) == {"w0", "w2"}


def test_a_wait_for_a_host_with_all_members_has_no_limit_as_nothing_follows_from_its_end() -> None:
    checkpoint = CheckpointWritten(name="c", branch=0, step=2, url="u")
    alone = after(training("w0", "w1", hosts=("h0", "h0")), checkpoint)
    wait = awaiting(alone, "silent", host="h0")
    assert wait.limit_s is None and "up to" not in wait.reason
    two = after(training("w0", "w1", hosts=("h0", "h1")), checkpoint, lost("w1"), entered("w0", 2))
    joining = after(two, joined("w2", "h1", late=True), entered("w0", 3), entered("w2", 3, behind=True))
    assert after(joining, HostSilent(host="h0", reason="silent")).awaited
    assert awaiting(joining, "silent", host="h0").limit_s == 60.0


def test_a_worker_that_was_lost_before_it_joined_is_on_no_host_that_may_start_others() -> None:
    state = after(
        JobState(slots=2), ReplacementsEnded(host="h0", reason="--max-restarts is 0"), joined("w0"), lost("w1")
    )
    assert state.known_hosts == {"h0"} and not state.replaceable


def test_a_worker_that_leaves_before_the_first_generation_is_not_waited_for_when_the_job_begins_again() -> None:
    state = after(JobState(slots=2), joined("w0"), DrainRequested(worker_id="w0"), WorkerLeft(worker_id="w0", step=0))
    state = after(state, joined("w1"), entered("w1", 1))
    state = after(state, CheckpointWritten(name="c", branch=0, step=2, url="u"), lost("w1"))
    assert state.restoring
    again = after(state, joined("w2", late=True))
    assert again.generation is not None and again.generation.worker_ids == ("w2",)


def test_the_first_generation_is_made_when_the_last_one_that_is_missed_has_left() -> None:
    state = after(JobState(slots=2), joined("w0"))
    assert state.generation is None
    # A lighthouse that was started again hears of w0 first, and then that w1 had left.
    assert after(state, WorkerLeft(worker_id="w1", step=0)).generation is not None


def test_a_job_that_begins_again_owes_no_code_after_the_loop() -> None:
    checkpoint = CheckpointWritten(name="c", branch=0, step=2, url="u")
    ended = (LoopEnded(worker_id="w0", step=9, loop=1), LoopEnded(worker_id="w1", step=9, loop=1))
    state = after(training("w0", "w1"), checkpoint, *ended, lost("w0"))
    assert state.unfinished_scripts
    state = after(state, lost("w1"))
    assert state.restoring and not state.owed


def test_the_loss_of_the_last_worker_past_its_script_ends_a_job_that_others_have_finished() -> None:
    state = training("w0", "w1")
    for worker_id in ("w0", "w1"):
        state = after(state, LoopEnded(worker_id=worker_id, step=9, loop=1))
    state = after(state, ScriptEnded(worker_id="w0"), ScriptEnded(worker_id="w1"))
    state = after(state, WorkerFinished(worker_id="w0", step=9, digest="d"))
    assert state.stopping is None
    state = after(state, lost("w1"))
    assert state.stopping is not None and state.stopping.exit_code == EXIT_FINISHED


def test_exit_code_0_of_a_worker_that_is_to_leave_is_not_the_end_of_the_job() -> None:
    state = after(training("w0", "w1"), DrainRequested(worker_id="w0"))
    early = WorkerFinished(worker_id="w0", step=3, complete=False)
    state = after(state, early)
    assert not state.having("finished")
    alone = after(training("w0"), DrainRequested(worker_id="w0"))
    alone = replace(alone, checkpoint=CheckpointWritten(name="c", branch=0, step=2, url="u"))
    known = observe(alone, early)
    actions = decide(POLICIES, known, early)
    assert any(isinstance(action, Restore) for action in actions)
    assert not any(isinstance(action, Stop | Reconfigure) for action in actions)


def exhausted(host: str) -> ReplacementsEnded:
    return ReplacementsEnded(host=host, reason="--max-restarts is 1, and as many were started")


def test_no_other_is_waited_for_in_the_place_of_one_whose_host_starts_no_more_workers() -> None:
    state = training("w0", "w1", "w2", hosts=("h0", "h0", "h1"))
    held = after(state, lost("w1"), policies=WAITING)
    assert held.holding, "h0 can start another one"
    told = after(held, exhausted("h0"), policies=WAITING)
    assert told.members == ("w0", "w2") and not told.holding
    at_once = after(state, exhausted("h0"), lost("w1"), policies=WAITING)
    assert at_once.members == ("w0", "w2") and not at_once.holding


def test_a_slot_that_stays_empty_does_not_keep_a_job_waiting_that_got_its_replacement() -> None:
    state = after(training("w0", "w1", "w2", hosts=("h0", "h0", "h1")), exhausted("h0"), lost("w1"), policies=WAITING)
    assert state.generation is not None
    number = state.generation.number
    state = after(state, entered("w0", number), entered("w2", number), lost("w2"), policies=WAITING)
    assert state.holding
    state = after(state, joined("w3", "h1", late=True), policies=WAITING)
    assert state.members == ("w0", "w3") and not state.holding


def test_one_past_its_script_that_is_in_the_way_is_not_just_taken_out_but_the_others_meet_without_it() -> None:
    """A generation that broke says so once: without a new one, the member that takes the state would wait for ever."""
    state = training("w0", "w1", "w2")
    for worker_id in ("w0", "w1", "w2"):
        state = after(state, LoopEnded(worker_id=worker_id, step=9, loop=1))
    state = after(state, ScriptEnded(worker_id="w0"), ScriptEnded(worker_id="w1"), lost("w2"), joined("w3", late=True))
    number = state.highest
    state = after(state, entered("w0", number), entered("w1", number), entered("w3", number, behind=True))
    broken = (ExchangeBroken(worker_id=each, generation=number, missed=("w0",)) for each in ("w1", "w3"))
    blamed = WorkerLost(worker_id="w0", reason="in the way", source="peers", step=9)
    state = after(state, *broken, blamed)
    assert state.generation is not None and state.generation.worker_ids == ("w1", "w3")
