"""Calls between the steps, with workers killed in the middle of each: the others come to the same results (P1, P3)."""

from __future__ import annotations

import pytest

from craft.testing import Fault

from .jobs import SCRIPTS, Jobs, References, describe

SCRIPT = SCRIPTS / "between.py"
STEPS = 12


@pytest.fixture(scope="module")
def reference(references: References) -> str:
    """One worker alone: what it hears depends on nobody."""
    return references.digest_of(SCRIPT, workers=1)


def test_results_do_not_depend_on_the_number_of_workers_P1(jobs: Jobs, reference: str) -> None:
    jobs.run(SCRIPT, workers=3).assert_exact(reference, faults=0, steps=STEPS)


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("point", "occurrence"),
    [
        ("before_evaluate", 1),
        ("scored", 2),
        ("before_all_reduce", 1),
        ("before_broadcast", 1),
        ("before_barrier", 1),
        # Within a call, between its parts: an evaluation is the first call of a step, a barrier the last of five.
        ("calling", 1),
        ("calling", 5),
        ("called", 1),
        ("called", 4),
    ],
)
def test_a_worker_that_dies_in_a_call_is_left_out_of_it_P1_P3(
    jobs: Jobs, reference: str, point: str, occurrence: int, rank: int
) -> None:
    # The script's own points know the step by its number; those of a call by the number of committed steps.
    fault = Fault(point=point, step=4 if point.startswith("before") else 5, rank=rank, occurrence=occurrence)
    result = jobs.run(SCRIPT, workers=3, faults=[fault])
    assert len(result.struck) == 1, describe(result)
    result.assert_exact(reference, faults=1, steps=STEPS)


def test_a_joiner_that_catches_up_hears_what_the_others_heard_P1(jobs: Jobs, references: References) -> None:
    steps = ("--steps", "60")
    faults = [Fault(point="before_all_reduce", step=6, rank=1), Fault(point="called", rank=0, occurrence=60)]
    result = jobs.run(
        SCRIPT, *steps, "--pause", "0.01", workers=3, faults=faults, environment={"CRAFT_MAX_RESTARTS": "20"}
    )
    assert len(result.struck) == 2, describe(result)
    result.assert_exact(references.digest_of(SCRIPT, *steps, workers=1), faults=2, steps=60)
    assert {line["worker_id"] for line in result.events("WorkerFinished")} & {"w3", "w4"}, describe(result)
