"""Workers that die at every point of a step, by SIGKILL to real processes: the others end with the same bits (P1 to P3).

Each test of one loss is run with the leader as the victim, who hosts the store of its generation, and with another.
"""

from __future__ import annotations

import time

import pytest

from craft.testing import Fault

from .jobs import TRAIN, Jobs, References, Result, describe, wait_for

STEPS = 10
VICTIMS = pytest.mark.parametrize("rank", [0, 2], ids=["leader", "other"])


def run_with(jobs: Jobs, *faults: Fault, workers: int = 4) -> Result:
    """Run the job with ``faults``, each of which must strike."""
    result = jobs.run(faults=faults, workers=workers)
    assert len(result.struck) == len(faults), f"of {len(faults)} faults, struck have {result.struck}" + describe(result)
    return result


@pytest.mark.parametrize("worker", ["w0", "w3"])
def test_a_worker_that_dies_as_it_joins_is_not_waited_for_P1(jobs: Jobs, references: References, worker: str) -> None:
    result = run_with(jobs, Fault(point="join", worker=worker))
    result.assert_exact(references.digest(), faults=1, steps=STEPS)


@VICTIMS
@pytest.mark.parametrize("point", ["opening", "opened"])
def test_a_worker_that_dies_while_the_first_group_opens_is_left_out_P1(
    jobs: Jobs, references: References, point: str, rank: int
) -> None:
    result = run_with(jobs, Fault(point=point, rank=rank, step=0))
    result.assert_exact(references.digest(), faults=1, steps=STEPS)


@VICTIMS
def test_the_first_batch_of_a_worker_that_dies_before_it_is_redone_P1_P2(
    jobs: Jobs, references: References, rank: int
) -> None:
    result = run_with(jobs, Fault(point="batch", step=0, rank=rank))
    result.assert_exact(references.digest(), faults=1, steps=STEPS)


@VICTIMS
def test_a_worker_that_dies_in_forward_is_redone_P1_P2(jobs: Jobs, references: References, rank: int) -> None:
    result = run_with(jobs, Fault(point="forward", step=5, rank=rank, occurrence=2))
    result.assert_exact(references.digest(), faults=1, steps=STEPS)


@VICTIMS
def test_a_worker_that_dies_in_backward_with_buckets_already_exchanged_is_redone_P1_P2(
    jobs: Jobs, references: References, rank: int
) -> None:
    """It dies when its second bucket of three is ready, and the whole of the first one was exchanged."""
    result = run_with(jobs, Fault(point="flushed", step=5, rank=rank, occurrence=2, after="result_sent"))
    result.assert_exact(references.digest(), faults=1, steps=STEPS)
    (retried,) = result.events("StepRetried")
    assert (retried["step"], len(retried["given"])) == (5, 2)


@VICTIMS
@pytest.mark.parametrize("occurrence", [1, 2, 8])
def test_a_result_that_reached_some_and_not_others_is_not_committed_by_anybody_P3(
    jobs: Jobs, references: References, rank: int, occurrence: int
) -> None:
    """It dies between two sends of its part of a bucket; there are three buckets and three peers."""
    result = run_with(jobs, Fault(point="result_part", step=5, rank=rank, occurrence=occurrence))
    result.assert_exact(references.digest(), faults=1, steps=STEPS)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("point", ["before_acknowledge", "acknowledging"])
def test_an_acknowledgement_that_reached_some_and_not_others_leads_to_one_history_P3(
    jobs: Jobs, references: References, point: str, rank: int
) -> None:
    result = run_with(jobs, Fault(point=point, step=5, rank=rank))
    result.assert_exact(references.digest(), faults=1, steps=STEPS)


@VICTIMS
def test_a_worker_that_dies_in_the_update_code_costs_no_microbatch_P1_P2(
    jobs: Jobs, references: References, rank: int
) -> None:
    result = run_with(jobs, Fault(point="update", step=5, rank=rank))
    result.assert_exact(references.digest(), faults=1, steps=STEPS)


@pytest.mark.parametrize("second", [0, 1], ids=["then the leader", "then another"])
@pytest.mark.parametrize("point", ["opening", "opened", "entering", "claimed"])
def test_a_second_worker_that_dies_while_the_first_is_replaced_leads_to_a_third_generation_P1_P3(
    jobs: Jobs, references: References, point: str, second: int
) -> None:
    """The first one to die has the highest rank, so that the others keep theirs."""
    result = run_with(jobs, Fault(point="batch", step=5, rank=3), Fault(point=point, step=5, rank=second, kind="kill"))
    result.assert_exact(references.digest(), faults=2, steps=STEPS)


def test_a_death_while_a_broken_group_is_entered_by_some_only_is_survived_P1_P3(
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


@pytest.mark.parametrize("ranks", [(0, 1), (1, 3)], ids=["with the leader", "without the leader"])
def test_two_workers_that_die_at_the_same_instant_are_both_redone_P1(
    jobs: Jobs, references: References, ranks: tuple[int, int]
) -> None:
    steps = "60"
    job = jobs.start(TRAIN, "--steps", steps)
    job.reach_step(10)
    members = job.members()
    job.kill(*(members[rank] for rank in ranks))
    job.wait().assert_exact(references.digest("--steps", steps), faults=2, steps=60)


@pytest.mark.parametrize("survivor", [0, 3])
def test_one_worker_that_is_left_does_the_whole_job_P1(jobs: Jobs, references: References, survivor: int) -> None:
    steps = "60"
    job = jobs.start(TRAIN, "--steps", steps)
    job.reach_step(10)
    job.kill(*(member for rank, member in enumerate(job.members()) if rank != survivor))
    job.wait().assert_exact(references.digest("--steps", steps), faults=3, steps=60)


@VICTIMS
@pytest.mark.parametrize(
    "point", ["batch", "result_part", "before_acknowledge", "acknowledging", "committed", "update"]
)
def test_a_death_in_the_last_step_leaves_nobody_behind_P1_P3(
    jobs: Jobs, references: References, point: str, rank: int
) -> None:
    result = run_with(jobs, Fault(point=point, step=STEPS - 1, rank=rank))
    result.assert_exact(references.digest(), faults=1, steps=STEPS)


@VICTIMS
def test_the_loader_processes_of_a_dead_worker_end_and_nobody_waits_for_them_P1_P5(
    jobs: Jobs, references: References, rank: int
) -> None:
    """They hold its sockets open, so that without an end to them the survivors would not see it die."""
    steps = "60"
    job = jobs.start(TRAIN, "--steps", steps, "--loaders", "2", workers=3)
    job.reach_step(5)
    victim = job.members()[rank]
    (pid,) = [pid for worker, pid in job.pids().items() if worker == victim]
    loaders = [process for process in job.processes() if process.ppid() == pid]
    assert len(loaders) == 2
    job.kill(victim)
    killed = time.monotonic()
    wait_for(lambda: not any(loader.is_running() for loader in loaders), "its loader processes end", 10)
    committed = job.steps()
    wait_for(lambda: job.steps() > committed or None, "the others go on", 10)
    assert time.monotonic() - killed < 5
    job.wait().assert_exact(references.digest("--steps", steps), faults=1, steps=60)
