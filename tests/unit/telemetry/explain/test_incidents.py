"""What losses cost, from the files of a run."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from craft.telemetry.explain.incidents import incidents
from craft.telemetry.history import Commit, Run, fault_costs, went_on


def commit(step: int, time: float, generation: int, branch: int = 0) -> Commit:
    return Commit(
        step=step, branch=branch, time=time, generation=generation, world_size=1, microbatches=(0,), plan={0: "w"}
    )


def lost(worker_id: str, time: float) -> dict[str, Any]:
    return {"time": time, "kind": "event", "event": "WorkerLost", "worker_id": worker_id}


def made(generation: int) -> dict[str, Any]:
    return {"time": 0.0, "kind": "action", "action": "Reconfigure", "generation": generation}


def test_a_loss_costs_the_time_until_the_next_commit_less_a_step() -> None:
    run = Run(
        journal=(made(1), lost("w1", 3.5), made(2)),
        commits={"w0": (commit(0, 1.0, 1), commit(1, 2.0, 1), commit(2, 3.0, 1), commit(3, 6.0, 2))},
    )
    (cost,) = fault_costs(run)
    assert (cost.generation, cost.what, cost.lost_s) == (2, "w1", 2.0)


def test_the_loss_of_all_counts_once_and_costs_what_is_computed_once_more() -> None:
    before = (commit(0, 1.0, 1), commit(1, 2.0, 1), commit(2, 3.0, 1))
    again = tuple(commit(step, 10.0 + step, 3, branch=1) for step in (1, 2, 3))
    run = Run(
        journal=(
            *(made(1), lost("w0", 3.5), made(2), lost("w1", 3.5)),
            *({"time": 0.0, "kind": "action", "action": "Restore", "branch": 1, "step": 1}, made(3)),
        ),
        commits={"w0": before, "w1": before, "w2": again},
    )
    (cost,) = fault_costs(run)
    # Step 3 is the first that had not been there: from 3.0 to 13.0, less a step.
    assert (cost.generation, cost.what, cost.lost_s) == (3, "w0, w1", 9.0)
    assert (cost.steps_lost, cost.microbatches_lost) == (2, 2)


RESTORE = {"time": 0.0, "kind": "action", "action": "Restore", "branch": 1, "step": 1}


def test_a_loss_of_all_after_which_nothing_new_was_committed_did_not_end_the_job() -> None:
    before = (commit(0, 1.0, 1), commit(1, 2.0, 1), commit(2, 3.0, 1))
    run = Run(journal=(made(1), lost("w0", 3.5), RESTORE, made(2)), commits={"w0": before})
    (cost,) = fault_costs(run)
    assert cost.lost_s is None and not went_on(run, cost)
    again = replace(run, commits={"w0": before, "w1": (commit(1, 9.0, 2, branch=1),)})
    (cost,) = fault_costs(again)
    assert cost.lost_s is None and went_on(again, cost)


def test_what_was_told_after_a_new_beginning_is_no_part_of_what_was_lost_before() -> None:
    told = {"worker_id": "w2", "generation": 4, "since": 0, "lost": ["w3"], "step": 1, "lost_s": None, "redone": [0]}
    run = Run(
        journal=(
            *(made(1), lost("w1", 2.5), made(2), lost("w0", 5.5), RESTORE, made(3), lost("w3", 7.5), made(4)),
            {"time": 8.0, "kind": "event", "event": "Recovered", **told},
        ),
        commits={
            "w0": (commit(0, 1.0, 1), commit(1, 2.0, 1), commit(2, 5.0, 2)),
            "w2": tuple(commit(step, 8.0 + step, 4, branch=1) for step in (1, 2, 3)),
        },
    )
    assert [(cost.generation, cost.recovered is not None) for cost in fault_costs(run)] == [
        (2, False),
        (3, True),
        (4, True),
    ]


def test_the_loss_of_all_is_an_incident_that_ends_where_the_job_goes_on_from_a_checkpoint() -> None:
    fault = {"time": 4.0, "kind": "outcome", "outcome": "Fault", "worker_ids": ["w0"], "generation": 1, "host": None}
    restore = {
        "time": 4.0,
        "kind": "action",
        "action": "Restore",
        "branch": 1,
        "step": 1,
        "reason": "no worker is left",
    }
    begun = {"time": 5.0, "kind": "event", "event": "CheckpointRestored", "step": 1}
    later = {"time": 9.0, "kind": "event", "event": "CheckpointWritten", "step": 9}
    journal = [made(1), lost("w0", 3.5), restore, fault, made(2), begun, later]
    (found,) = incidents(journal)
    assert found.missed and found.lines == tuple(journal[1:6]) and found.after == (later,)
