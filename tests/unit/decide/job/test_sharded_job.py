"""The lighthouse of a job of sharded replicas: it makes generations in which at least one replica is complete."""

from __future__ import annotations

import msgspec

from craft.decide.job.apply import apply
from craft.decide.job.last_copy import is_last_copy
from craft.decide.job.observe import observe
from craft.decide.job.state import JobState
from craft.decide.policies import decide
from craft.decide.techniques import defaults
from craft.protocol.actions import AnyAction, Hold, Propose, Reconfigure, Restore, Stop
from craft.protocol.events import AnyEvent, CheckpointWritten, GenerationEntered, WorkerEnded, WorkerJoined, WorkerLost
from craft.protocol.membership import Generation, Member, Slot

POLICIES = defaults().policies()


def told(state: JobState, *events: AnyEvent) -> tuple[JobState, list[AnyAction]]:
    actions: list[AnyAction] = []
    for event in events:
        state = observe(state, event)
        for action in decide(POLICIES, state, event):
            state = apply(state, action, "x")
            actions.append(action)
    return state, actions


def joined(name: str, replica: int, position: int) -> WorkerJoined:
    place = ord(name) - ord("a")
    return WorkerJoined(member=Member(worker_id=name, host="h", slot=Slot(replica, position), local_rank=place))


def lost(name: str) -> WorkerLost:
    return WorkerLost(worker_id=name, reason="killed", source="agent")


def formed() -> JobState:
    four = [joined("a", 0, 0), joined("b", 0, 1), joined("c", 1, 0), joined("d", 1, 1)]
    state, _ = told(JobState(slots=4, replica_size=2), *four)
    return state


def entered(state: JobState) -> JobState:
    assert state.generation is not None
    events = [GenerationEntered(worker_id=each, generation=state.generation.number) for each in state.members]
    return told(state, *events)[0]


def slots(generation: Generation | None) -> dict[str, tuple[int, int]]:
    assert generation is not None
    return {
        each.worker_id: (each.slot.replica, each.slot.position)
        for each in generation.members
        if isinstance(each.slot, Slot)
    }


def test_the_others_of_a_replica_stay_members_when_it_loses_a_worker() -> None:
    state, actions = told(entered(formed()), lost("b"))

    assert [type(each) for each in actions] == [Reconfigure]
    assert slots(state.generation) == {"a": (0, 0), "c": (1, 0), "d": (1, 1)}


def test_a_newcomer_takes_the_free_slot_of_its_position_at_a_boundary() -> None:
    state, _ = told(entered(formed()), lost("b"))
    state, actions = told(entered(state), joined("e", 0, 1))

    assert [type(each) for each in actions] == [Propose]
    assert slots(state.upcoming) == {"a": (0, 0), "c": (1, 0), "d": (1, 1), "e": (0, 1)}


def test_a_newcomer_whose_position_is_taken_everywhere_waits() -> None:
    state, _ = told(entered(formed()), lost("b"))

    _, actions = told(entered(state), joined("e", 0, 0))

    assert actions == []


def test_losses_at_different_positions_leave_one_complete_replica() -> None:
    state, _ = told(entered(formed()), lost("b"), lost("c"))

    assert slots(state.generation) == {"a": (0, 0), "d": (0, 1)}


def test_without_any_worker_of_a_position_its_state_is_lost() -> None:
    _, actions = told(entered(formed()), lost("b"), lost("d"))

    assert isinstance(actions[-1], Stop)
    assert "every worker that had the training state of position 1 is lost" in actions[-1].reason


def test_the_job_begins_again_from_a_checkpoint_with_workers_at_every_position() -> None:
    saved = CheckpointWritten(step=4, branch=0, name="step-4", url="file")
    state, actions = told(entered(formed()), saved, lost("b"), lost("d"))
    assert isinstance(actions[-1], Restore)
    assert {view.member.worker_id for view in state.having("lost")} == set("abcd"), (
        "a and c are to begin again as others"
    )

    state, actions = told(state, *(WorkerEnded(worker_id=each) for each in "ac"), joined("e", 0, 0), joined("f", 0, 0))
    assert not actions, "no replica is complete"
    state, actions = told(state, joined("g", 0, 1), joined("h", 0, 1))
    assert isinstance(actions[-1], Reconfigure)
    assert sorted(slots(state.generation).values()) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_fewer_workers_than_wanted_wait_for_one_at_the_missing_position() -> None:
    state = msgspec.structs.replace(entered(formed()), min_workers=4)
    state, actions = told(state, lost("b"))
    assert isinstance(actions[-1], Hold)

    state, actions = told(state, joined("e", 1, 0))
    assert not actions, "it has no place in a replica"
    state, actions = told(state, joined("f", 1, 1))

    assert isinstance(actions[-1], Reconfigure)
    assert slots(state.generation)["f"][1] == 1


def test_the_last_copy_is_one_of_a_position() -> None:
    state, _ = told(entered(formed()), lost("b"))
    state = entered(state)

    assert is_last_copy(state, {"d"})
    assert not is_last_copy(state, {"c"}), "a has the same shard"
    assert is_last_copy(state, {"a", "c"})


def test_a_job_that_is_not_sharded_sends_what_it_always_sent() -> None:
    made = Generation(number=1, nonce="x", members=(Member(worker_id="a"),))

    assert b"slot" not in msgspec.json.encode(made) and b"replica_size" not in msgspec.json.encode(made)
    assert msgspec.json.decode(msgspec.json.encode(made), type=Generation) == made
    sharded = formed().generation
    assert msgspec.json.decode(msgspec.json.encode(sharded), type=Generation) == sharded
