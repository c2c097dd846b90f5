"""What a run shows of the figures of a plan. How ``craft plan`` takes them is tested with it."""

from __future__ import annotations

from typing import Any

from craft.plan.measured import measure
from craft.telemetry.history import Commit, Run


def commits(*times: float) -> tuple[Commit, ...]:
    plan: dict[int, str | None] = {0: "w0", 1: "w1", 2: None}
    return tuple(
        Commit(step=step, branch=0, time=time, generation=1, world_size=2, microbatches=(0,), plan=plan)
        for step, time in enumerate(times)
    )


def test_a_run_without_anything_shows_nothing() -> None:
    found = measure(Run(journal=(), commits={}))
    assert (found.workers, found.step_s, found.checkpoint_s, found.stall_s, found.pause_s) == (None,) * 5
    assert (found.failures, found.elapsed_s) == (0, 0.0)


def test_steps_are_those_of_who_was_there_longest_and_the_time_is_that_of_all() -> None:
    found = measure(Run(journal=(), commits={"w0": commits(10, 11), "w1": commits(10, 12, 14, 99)}))
    assert (found.step_s, found.elapsed_s, found.microbatches) == (2, 89, 3)


def test_a_replacement_took_until_all_places_were_filled_again() -> None:
    def entered(generation: int, time: float) -> dict[str, Any]:
        return {"event": "GenerationEntered", "generation": generation, "time": time}

    journal: list[dict[str, Any]] = [
        {"event": "LighthouseStarted", "slots": 2},
        {"action": "Reconfigure", "generation": 1, "members": ["w0", "w1"]},
        entered(1, 100.0),
        {"action": "Reconfigure", "generation": 2, "members": ["w0"]},
        {"outcome": "Fault", "worker_ids": ["w1"], "time": 200.0},
        entered(2, 200.1),
        {"action": "Propose", "generation": 3, "members": ["w0", "w2"]},
        entered(3, 207.0),
        entered(3, 208.0),
        # Nobody came in its place.
        {"outcome": "Fault", "worker_ids": ["w2"], "time": 300.0},
    ]
    assert measure(Run(journal=tuple(journal), commits={})).replace_s == 7.0


def test_what_was_measured_last_counts_and_of_what_came_often_the_median() -> None:
    journal: list[dict[str, Any]] = [
        {"event": "LighthouseStarted", "slots": 6},
        *({"event": "CheckpointWritten", "seconds": seconds} for seconds in (1.0, 9.0, 2.0)),
        {"event": "IntervalChosen", "interval_s": 9.0, "cost_s": 0.5},
        {"event": "IntervalChosen", "interval_s": 5.0, "cost_s": 0.25},
        # As an older run has it.
        {"event": "IntervalChosen", "interval_s": 5.0},
        *(
            {"outcome": "Fault", "worker_ids": workers, "time": 9.0}
            for workers in (["w1"], ["w2", "w3", "w4"], ["w5", "w6", "w7"])
        ),
    ]
    found = measure(Run(journal=tuple(journal), commits={}))
    assert (found.workers, found.checkpoint_s, found.stall_s) == (6, 2.0, 0.25)
    assert (found.failures, found.lost_workers) == (3, 3)
