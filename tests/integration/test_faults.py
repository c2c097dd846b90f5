"""Workers that die at every point of a step, by SIGKILL to real processes: the others end with the same bits (P1 to P3).

Most jobs lose two workers, one after the other: first the leader, who hosts the store of its generation, then another.
"""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from craft.testing import Fault

from .jobs import TRAIN, Job, Jobs, References, Result, describe, wait_for

STEPS = 10
LEADER, OTHER = 0, 2
LONGER = ("--steps", "60")
"""For tests that kill from outside, while the job goes on."""


class Outside:
    """Runs a job that goes slowly until a test has killed all it wants."""

    def __init__(self, jobs: Jobs, references: References, folder: Path) -> None:
        self._jobs = jobs
        self._references = references
        self._hurry = folder / "hurry"

    def start(self, *arguments: str, workers: int = 4) -> Job:
        return self._jobs.start(TRAIN, *LONGER, "--slow-until", str(self._hurry), *arguments, workers=workers)

    def finish(self, job: Job, *, lost: int) -> None:
        self._hurry.touch()
        job.wait().assert_exact(self._references.digest(*LONGER), faults=lost, steps=60)


@pytest.fixture
def outside(jobs: Jobs, references: References, tmp_path: Path) -> Outside:
    return Outside(jobs, references, tmp_path)


def run_with(jobs: Jobs, *faults: Fault, workers: int = 4) -> Result:
    """Run the job with ``faults``, each of which must strike."""
    result = jobs.run(faults=faults, workers=workers)
    assert len(result.struck) == len(faults), f"of {len(faults)} faults, struck have {result.struck}" + describe(result)
    return result


def first_the_leader_then_another(point: str, occurrence: int = 1, after: str | None = None) -> list[Fault]:
    return [
        Fault(point=point, step=step, rank=rank, occurrence=occurrence, after=after)
        for step, rank in ((3, LEADER), (6, OTHER))
    ]


# Before the first step.


def test_workers_that_die_as_they_join_are_not_waited_for_P1(jobs: Jobs, references: References) -> None:
    result = run_with(jobs, Fault(point="join", worker="w0"), Fault(point="join", worker="w3"))
    result.assert_exact(references.digest(), faults=2, steps=STEPS)


@pytest.mark.parametrize(
    ("point", "rank"), [("opening", LEADER), ("opened", OTHER), ("started", LEADER), ("started", OTHER)]
)
def test_a_worker_that_dies_while_the_first_group_opens_is_left_out_P1(
    jobs: Jobs, references: References, point: str, rank: int
) -> None:
    result = run_with(jobs, Fault(point=point, rank=rank, step=0))
    result.assert_exact(references.digest(), faults=1, steps=STEPS)


@pytest.mark.parametrize("rank", [LEADER, OTHER])
def test_the_first_batch_of_a_worker_that_dies_before_it_is_redone_P1_P2(
    jobs: Jobs, references: References, rank: int
) -> None:
    result = run_with(jobs, Fault(point="batch", step=0, rank=rank))
    result.assert_exact(references.digest(), faults=1, steps=STEPS)


# Along a step.


@pytest.mark.parametrize("point", ["forward", "backward"])
def test_a_worker_that_dies_in_its_second_microbatch_is_redone_P1_P2(
    jobs: Jobs, references: References, point: str
) -> None:
    result = run_with(jobs, *first_the_leader_then_another(point, occurrence=2))
    result.assert_exact(references.digest(), faults=2, steps=STEPS)
    assert [line["step"] for line in result.events("StepRetried")] == [3, 6]


def test_a_worker_that_dies_in_backward_with_buckets_already_exchanged_is_redone_P1_P2(
    jobs: Jobs, references: References
) -> None:
    """It dies when its second bucket of three is ready, and the whole of the first one was exchanged."""
    result = run_with(jobs, *first_the_leader_then_another("flushed", occurrence=2, after="result_sent"))
    result.assert_exact(references.digest(), faults=2, steps=STEPS)
    assert [line["step"] for line in result.events("StepRetried")] == [3, 6]


@pytest.mark.parametrize("occurrence", [1, 5])
def test_a_result_that_reached_some_and_not_others_is_not_committed_by_anybody_P3(
    jobs: Jobs, references: References, occurrence: int
) -> None:
    """It dies between two sends of its part of a bucket; there are three buckets, and three peers or two."""
    result = run_with(jobs, *first_the_leader_then_another("result_part", occurrence=occurrence))
    result.assert_exact(references.digest(), faults=2, steps=STEPS)


@pytest.mark.parametrize("point", ["before_acknowledge", "acknowledging"])
def test_an_acknowledgement_that_reached_some_and_not_others_leads_to_one_history_P3(
    jobs: Jobs, references: References, point: str
) -> None:
    """Three die, in groups of four, of three and of two."""
    faults = [Fault(point=point, step=step, rank=rank) for step, rank in ((2, 3), (4, 1), (6, 0))]
    result = run_with(jobs, *faults)
    result.assert_exact(references.digest(), faults=3, steps=STEPS)


def test_a_worker_that_dies_in_the_update_code_costs_no_microbatch_P1_P2(jobs: Jobs, references: References) -> None:
    result = run_with(jobs, *first_the_leader_then_another("update"))
    result.assert_exact(references.digest(), faults=2, steps=STEPS)


@pytest.mark.parametrize(
    ("point", "rank"),
    [
        ("result_part", OTHER),
        ("before_acknowledge", LEADER),
        ("acknowledging", LEADER),
        ("acknowledging", OTHER),
        ("committed", LEADER),
        ("update", OTHER),
    ],
)
def test_a_death_in_the_last_step_leaves_nobody_behind_P1_P3(
    jobs: Jobs, references: References, point: str, rank: int
) -> None:
    result = run_with(jobs, Fault(point=point, step=STEPS - 1, rank=rank))
    result.assert_exact(references.digest(), faults=1, steps=STEPS)


# While the survivors of an earlier loss regroup.


@pytest.mark.parametrize("point", ["opening", "opened", "entering", "claimed"])
def test_a_second_worker_that_dies_while_the_first_is_replaced_leads_to_a_third_generation_P1_P3(
    jobs: Jobs, references: References, point: str
) -> None:
    """Twice in a job of six: first the leader is the second one to die, then another. The first has the highest rank.

    The second one is at whichever step it is when it hears of the first: it may be slow to begin it.
    """
    result = run_with(
        jobs,
        Fault(point="batch", step=3, rank=5),
        Fault(point=point, rank=0, after_file="struck/0"),
        Fault(point="batch", step=6, rank=3),
        Fault(point=point, rank=1, after_file="struck/2"),
        workers=6,
    )
    result.assert_exact(references.digest(), faults=4, steps=STEPS)


def test_a_death_while_only_some_have_entered_a_generation_is_survived_P1_P3(
    jobs: Jobs, references: References
) -> None:
    """One is late to the second generation, and another dies before the late one has come."""
    result = run_with(
        jobs,
        Fault(point="backward", step=5, rank=2),
        Fault(point="entering", step=5, rank=1, kind="sleep", seconds=0.5),
        Fault(point="claimed", step=5, rank=0),
    )
    result.assert_exact(references.digest(), faults=2, steps=STEPS)


# Several at once.


def test_two_workers_that_die_at_the_same_instant_are_both_redone_P1(outside: Outside) -> None:
    """Twice in a job of five: once the leader is among them, once not."""
    job = outside.start(workers=5)
    job.reach_step(10)
    job.kill(*job.members()[:2])
    wait_for(lambda: len(job.members()) == 3, "a generation of three")
    job.reach_step(job.steps() + 10)
    job.kill(*job.members()[1:])
    outside.finish(job, lost=4)


def test_one_worker_that_is_left_does_the_whole_job_P1(outside: Outside) -> None:
    job = outside.start()
    job.reach_step(10)
    job.kill(*job.members()[:3])
    outside.finish(job, lost=3)


# Together with the lighthouse.


def test_a_death_while_there_is_no_lighthouse_is_answered_by_the_next_one_P1_P4(outside: Outside) -> None:
    job = outside.start()
    job.reach_step(10)
    leader = job.members()[0]
    job.helper("craft.cli.main lighthouse").kill()
    # It goes on without one.
    job.reach_step(job.steps() + 2)
    job.kill(leader)
    outside.finish(job, lost=1)


# With processes of its own.


def test_the_loader_processes_of_a_dead_worker_end_and_nobody_waits_for_them_P1_P5(outside: Outside) -> None:
    """They hold its sockets open, so that without an end to them the survivors would not see it die."""
    job = outside.start("--loaders", "2", workers=3)
    job.reach_step(5)
    for rank in (0, 1):
        victim = job.members()[rank]
        loaders = psutil.Process(job.pids()[victim]).children()
        assert len(loaders) == 2
        job.kill(victim)
        killed = time.monotonic()
        _, left = psutil.wait_procs(loaders, timeout=10)
        assert not left, "its loader processes live on"
        job.reach_step(job.steps() + 1)
        assert time.monotonic() - killed < 20
    outside.finish(job, lost=2)
