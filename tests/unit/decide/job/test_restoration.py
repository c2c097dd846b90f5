"""Whether, and from where, a job begins again; whatever happens to it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from craft.decide.job.apply import apply
from craft.decide.job.observe import observe
from craft.decide.job.restoration import Basis, basis, may_still_run
from craft.decide.job.state import JobState
from craft.decide.policies.policy import decide
from craft.decide.techniques import defaults
from craft.protocol.actions import AnyAction, Reconfigure, Restore, Stop
from craft.protocol.events import (
    AnyEvent,
    CheckpointRestored,
    CheckpointWritten,
    GenerationEntered,
    HoldExpired,
    HostLost,
    StateGone,
    WorkerEnded,
    WorkerJoined,
    WorkerLost,
)
from craft.protocol.membership import Member

POLICIES = defaults().policies()
NAMES = [f"w{number}" for number in range(8)]


def written(step: int, branch: int = 0) -> CheckpointWritten:
    return CheckpointWritten(name=f"{branch}-{step}", branch=branch, step=step, url="u")


def begun(step: int, branch: int, name: str) -> CheckpointRestored:
    return CheckpointRestored(name=name, branch=branch, step=step, url="u")


def test_a_job_begins_again_from_the_newest_checkpoint_of_its_own_course() -> None:
    fresh = JobState(slots=1)
    assert basis(fresh) == Basis(None, 0)
    assert basis(replace(fresh, reached=3)) is None
    assert basis(replace(fresh, reached=None)) is None
    own = observe(observe(fresh, written(10)), written(20))
    assert basis(own) == Basis("0-20", 20)
    resumed = observe(fresh, begun(100, 1, "0-100"))
    assert basis(resumed) == Basis("0-100", 100)
    assert basis(observe(resumed, written(110, 1))) == Basis("1-110", 110)
    # It was damaged, and an older one was used: that is the course now.
    assert basis(observe(own, begun(10, 1, "0-10"))) == Basis("0-10", 10)


def test_guests_that_saved_nothing_are_told_what_would_have_helped_them() -> None:
    state = JobState(slots=1, reached=3)
    joined = WorkerJoined(member=Member(worker_id="w0", guest=True))
    state = observe(state, joined)
    for action in decide(POLICIES, state, joined):
        state = apply(state, action, nonce="n")
    (stop,) = decide(POLICIES, state, StateGone(generation=1))
    assert isinstance(stop, Stop) and stop.reason.endswith(
        "from one that guest.saved() had told of the job would have gone on"
    )


def _joins(name: str, late: bool) -> AnyEvent:
    return WorkerJoined(member=Member(worker_id=name, host=f"h{NAMES.index(name) % 2}", late=late))


EVENTS = st.one_of(
    st.builds(_joins, st.sampled_from(NAMES), st.booleans()),
    st.builds(
        lambda name, source, step: WorkerLost(worker_id=name, reason="r", source=source, step=step),
        st.sampled_from(NAMES),
        st.sampled_from(["agent", "heartbeat"]),
        st.one_of(st.none(), st.integers(0, 30)),
    ),
    st.builds(lambda name: WorkerEnded(worker_id=name), st.sampled_from(NAMES)),
    st.builds(lambda host: HostLost(host=host, reason="r", step=7), st.sampled_from(["h0", "h1"])),
    st.builds(
        lambda name, number: GenerationEntered(worker_id=name, generation=number),
        st.sampled_from(NAMES),
        st.integers(1, 9),
    ),
    st.builds(lambda number: StateGone(generation=number), st.integers(1, 9)),
    st.builds(lambda number: HoldExpired(generation=number), st.integers(1, 9)),
    st.builds(written, st.integers(1, 30)),
)


def _checked(before: JobState, action: AnyAction, event: AnyEvent) -> JobState:
    after = apply(before, action, nonce="n")
    if isinstance(action, Restore):
        assert not before.members or isinstance(event, StateGone), "somebody has the state"
        assert action.branch > before.branch, "P3: a branch is never used twice"
        assert after.restoring and after.restoration is not None and after.restoration.tries <= 3
        assert before.restoration is None or after.restoration.number > before.restoration.number
    if isinstance(action, Reconfigure):
        assert after.generation is not None and after.generation.number > before.highest
    if isinstance(action, Reconfigure) and before.restoring:
        assert not may_still_run(before) or isinstance(event, HoldExpired), "P3: a second course beside the first"
        assert not set(action.members) & set(before.former.worker_ids if before.former else ())
    return after


@given(st.integers(1, 3), st.lists(EVENTS, max_size=60))
def test_whatever_happens_a_job_begins_again_only_when_nobody_has_the_state_P3(
    slots: int, events: list[AnyEvent]
) -> None:
    state = JobState(slots=slots)
    for event in events:
        state = observe(state, event)
        assert observe(state, event) == state
        for action in decide(POLICIES, state, event):
            state = _checked(state, action, event)
        if state.stopping is not None:
            assert isinstance(state.stopping, Stop)
            return
