"""Calls between the steps, with workers killed in the middle of each: the others come to the same results (P1, P3)."""

from __future__ import annotations

from pathlib import Path

import pytest

from craft.testing import Fault

from .jobs import SCRIPTS, Jobs, References, describe

SCRIPT = SCRIPTS / "between.py"
UNEVEN = SCRIPTS / "uneven.py"
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


def test_a_joiner_that_catches_up_hears_what_the_others_heard_P1(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    steps = ("--steps", "60")
    faults = [Fault(point="before_all_reduce", step=6, rank=1), Fault(point="called", rank=0, occurrence=60)]
    slow = ("--slow-until", str(tmp_path / "hurry"), "--slow-s", "0.01")
    job = jobs.start(SCRIPT, *steps, *slow, workers=3, faults=faults, environment={"CRAFT_MAX_RESTARTS": "20"})
    job.wait_for_committing(5)
    (tmp_path / "hurry").touch()
    result = job.wait()
    assert len(result.struck) == 2, describe(result)
    result.assert_exact(references.digest_of(SCRIPT, *steps, workers=1), faults=2, steps=60)
    assert {line["worker_id"] for line in result.events("WorkerFinished")} & {"w3", "w4"}, describe(result)


def test_a_joiner_that_dies_between_the_steps_before_it_computes_anything_holds_nobody_up_P1(
    jobs: Jobs, references: References
) -> None:
    """Who computes what stays the same without it, though the group is another."""
    steps = ("--steps", "30")
    faults = [
        Fault(point="before_all_reduce", step=6, rank=1),
        Fault(point="before_barrier", worker="w2", occurrence=2),
    ]
    slow = ("--slow-until", "run/struck/1")
    result = jobs.run(SCRIPT, *steps, *slow, workers=2, faults=faults, environment={"CRAFT_MAX_RESTARTS": "20"})
    assert len(result.struck) == 2, describe(result)
    result.assert_exact(references.digest_of(SCRIPT, *steps, workers=1), faults=2, steps=30)


@pytest.mark.parametrize("spares", [pytest.param("0", marks=pytest.mark.long), "1"])
def test_a_joiner_that_is_left_alone_in_an_evaluation_goes_on_by_itself_P1(
    jobs: Jobs, references: References, spares: str
) -> None:
    """It waits for the others' scores and computes its own instead; with a spare, it has the state for that one, too."""
    steps = ("--steps", "40")
    faults = [
        Fault(point="before_all_reduce", step=6, rank=1),
        Fault(point="loaded", kind="sleep"),
        Fault(point="before_evaluate", kind="sleep", seconds=1.0, worker="w0", after_file="struck/1"),
        Fault(point="scored", worker="w0", after_file="struck/2"),
    ]
    result = jobs.run(
        SCRIPT, *steps, "--slow-until", "run/struck/3",
        workers=2,
        options=("--spares", spares),
        faults=faults,
        environment={"CRAFT_MAX_RESTARTS": "20"},
    )  # fmt: skip
    assert len(result.struck) == 4, describe(result)
    result.assert_exact(references.digest_of(SCRIPT, *steps, workers=1), faults=2, steps=40)


def test_two_joiners_that_are_left_alone_at_different_steps_do_not_mix_their_calls_P1(
    jobs: Jobs, references: References
) -> None:
    """Both catch up, one in front of the other, when the last one that kept pace is lost, and with it what its calls returned."""
    steps = ("--steps", "40")
    faults = [
        Fault(point="before_evaluate", step=5, worker="w1"),
        Fault(point="before_evaluate", step=5, worker="w2"),
        Fault(point="loaded", kind="sleep", seconds=2.5, worker="w4"),
        Fault(point="loaded", kind="sleep", seconds=1.0, worker="w3"),
        Fault(point="replayed", kind="sleep", seconds=1.0, worker="w3", occurrence=2),
        Fault(point="before_evaluate", worker="w0", after_file="struck/4"),
    ]
    result = jobs.run(
        SCRIPT, *steps, "--slow-until", "run/struck/5", "--slow-s", "0.02",
        workers=3,
        options=("--spares", "2"),
        faults=faults,
        environment={"CRAFT_MAX_RESTARTS": "20"},
    )  # fmt: skip
    assert len(result.struck) == 6, describe(result)
    result.assert_exact(references.digest_of(SCRIPT, *steps, workers=1), faults=3, steps=40)


@pytest.mark.parametrize(
    ("kind", "at", "sentence"),
    [
        ("barrier", 0, "job.barrier() after step 0: w0 waits in it, but w1, w2 went on without it"),
        pytest.param(
            "all_but_one", 5, "job.all_reduce() after step 5: w1, w2 wait in it, but w0 went on", marks=pytest.mark.long
        ),
        # Nobody comes to another step after this one.
        pytest.param("checkpoint", 7, "job.checkpoint() after step 7: w0 waits in it", marks=pytest.mark.long),
        pytest.param(
            "another",
            2,
            "after step 2: w0 job.broadcast_object(), w1 job.barrier(), w2 job.barrier()",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_call_that_not_every_worker_makes_is_said_to_be_a_bug(
    jobs: Jobs, tmp_path: Path, kind: str, at: int, sentence: str
) -> None:
    result = jobs.run(
        UNEVEN,
        *("--kind", kind, "--at", str(at)),
        workers=3,
        environment={"CRAFT_HANG_LIMIT_S": "1", "CRAFT_CHECKPOINTS": str(tmp_path / "checkpoints")},
    )
    assert result.exit_code == 1, describe(result)
    (stop,) = [line for line in result.run.journal if line.get("action") == "Stop"]
    assert sentence in stop["reason"] and "every worker has to make the same calls" in stop["reason"], describe(result)
    assert "CallsDiffer: " in result.output and sentence in result.output, describe(result)


def test_an_evaluation_of_data_that_is_cut_by_the_rank_is_refused(jobs: Jobs) -> None:
    result = jobs.run(UNEVEN, "--kind", "split", "--at", "2", workers=2)
    assert result.exit_code == 2, describe(result)
    assert "job.evaluate: workers have different samples in the same batch" in result.output, describe(result)


def test_a_loop_that_not_every_worker_leaves_is_named_with_what_to_decide_by(jobs: Jobs) -> None:
    result = jobs.run(UNEVEN, "--kind", "break", "--at", "2", workers=2, environment={"CRAFT_HANG_LIMIT_S": "1"})
    assert result.exit_code == 1, describe(result)
    assert "w1 left the loop over the steps after step 2, as by break, but w0 went on" in result.output, describe(
        result
    )
    assert "Decide by what is the same on all of them (step.metrics" in result.output, describe(result)
