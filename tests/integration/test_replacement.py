"""Lost workers are replaced while the others go on, and the job ends with the same bits (P1 to P3)."""

from __future__ import annotations

import re
import time
from pathlib import Path

import psutil
import pytest

from craft.testing import Fault

from .jobs import TRAIN, Job, Jobs, References, Result, describe, wait_for

STEPS = 150
REPLACE = {"CRAFT_MAX_RESTARTS": "50"}


class Replaced:
    """Runs jobs that go slowly until enough workers have come and committed something."""

    def __init__(self, jobs: Jobs, references: References, folder: Path) -> None:
        self._jobs = jobs
        self._references = references
        self._hurry = folder / "hurry"

    def start(self, *arguments: str, workers: int = 3, **more: object) -> Job:
        environment = {**REPLACE, **more.pop("environment", {})}  # type: ignore[dict-item]
        return self._jobs.start(
            TRAIN, "--steps", str(STEPS), "--slow-until", str(self._hurry), *arguments,
            workers=workers, environment=environment, **more,  # type: ignore[arg-type]
        )  # fmt: skip

    def finish(self, job: Job, *, joined: int = 0) -> Result:
        """Wait until this many latecomers have committed a step each, then let the job run to its end."""

        def there() -> bool:
            assert job.process.poll() is None, "ended too early" + describe(job._result())
            return sum(1 for worker in job.committing() if worker not in FIRST) >= joined

        wait_for(there, f"{joined} workers joined and committed")
        self._hurry.touch()
        return job.wait()

    def reference(self, *arguments: str) -> str:
        return self._references.digest("--steps", str(STEPS), *arguments, workers=1)


FIRST = ("w0", "w1", "w2")


@pytest.fixture
def replaced(jobs: Jobs, references: References, tmp_path: Path) -> Replaced:
    return Replaced(jobs, references, tmp_path)


def test_a_lost_worker_is_replaced_and_the_job_is_back_at_full_strength_P1(replaced: Replaced) -> None:
    job = replaced.start()
    job.reach_step(5)
    job.kill("w1")
    result = replaced.finish(job, joined=1)
    result.assert_exact(replaced.reference(), faults=1, steps=STEPS)
    assert {line["worker_id"] for line in result.events("WorkerFinished")} == {"w0", "w2", "w3"}
    last = result.run.commits["w3"][-1]
    assert last.world_size == 3
    assert len(last.microbatches) > 0
    assert result.run.commits["w3"][0].step > 5


def test_whoever_joins_and_computes_other_bits_is_kept_out_P1(replaced: Replaced) -> None:
    """What the script changed in its loop, and nothing carries, is not there on a worker that comes later."""
    drifts = ("--drift-at", "2", "--switch-every", "1000")
    job = replaced.start(*drifts, environment={"CRAFT_MAX_RESTARTS": "2"})
    job.reach_step(5)
    job.kill("w1")
    kept_out = "WorkerFailed"
    wait_for(
        lambda: sum(line.get("event") == kept_out for line in job.journal()) == 2, "two have come and were kept out"
    )
    result = replaced.finish(job)
    result.assert_exact(replaced.reference(*drifts), faults=3, steps=STEPS)
    for failed in result.events("WorkerFailed"):
        assert "has other bits here" in failed["error"] and "register_state" in failed["error"]
    assert all(not commit.microbatches for worker in ("w3", "w4") for commit in result.run.commits.get(worker, ()))
    (exhausted,) = result.events("ReplacementsEnded")
    assert "--max-restarts is 2" in exhausted["reason"]


def test_layers_are_frozen_and_trained_again_in_every_step_while_somebody_catches_up_P1(replaced: Replaced) -> None:
    """A joiner that has not come to that code yet takes part in exchanges of what the others train."""
    slow = Fault(point="loaded", kind="sleep", seconds=0.5, worker="w3")
    job = replaced.start("--switch-every", "1", faults=[slow])
    job.reach_step(5)
    job.kill("w1")
    result = replaced.finish(job, joined=1)
    result.assert_exact(replaced.reference("--switch-every", "1"), faults=1, steps=STEPS)
    assert {line["worker_id"] for line in result.events("WorkerFinished")} == {"w0", "w2", "w3"}


def test_the_job_outlives_every_worker_it_began_with_P1(replaced: Replaced) -> None:
    job = replaced.start()
    for number, worker in enumerate(FIRST, start=1):
        job.reach_step(5 * number)
        job.kill(worker)
        job.wait_for_committing(3 + number)
    result = replaced.finish(job, joined=3)
    result.assert_exact(replaced.reference(), faults=3, steps=STEPS)
    assert not {line["worker_id"] for line in result.events("WorkerFinished")} & set(FIRST)


@pytest.mark.long
def test_joiners_that_had_to_catch_up_say_so_while_they_follow_and_compute_in_the_very_next_step_P1(
    replaced: Replaced,
) -> None:
    """Unless they catch up just between the word of a step and its result: not all of six do."""
    late = [f"w{number}" for number in range(3, 9)]
    job = replaced.start(
        faults=[Fault(point="loaded", kind="sleep", seconds=0.3, worker=worker) for worker in late],
        environment={"CRAFT_BUCKET_MB": "0.01"},
    )
    for number in range(6):
        job.reach_step(5 * number + 5)
        job.kill(f"w{number}")
        job.wait_for_committing(4 + number)
    result = replaced.finish(job, joined=6)
    result.assert_exact(replaced.reference(), faults=6, steps=STEPS)
    waited = []
    for worker in late:
        log = (result.run_dir / "workers" / worker / "log").read_text()
        computed = next((commit.step for commit in result.run.commits[worker] if commit.microbatches), None)
        found = re.search(r"keeps pace with the others from step (\d+) on", log)
        if found is not None and computed is not None:
            waited.append(computed - int(found.group(1)))
    assert waited and set(waited) <= {0, 1} and 0 in waited, (waited, describe(result))


def test_two_workers_lost_at_the_same_instant_are_both_replaced_P1(replaced: Replaced) -> None:
    job = replaced.start()
    job.reach_step(5)
    job.kill("w0", "w1")
    replaced.finish(job, joined=2).assert_exact(replaced.reference(), faults=2, steps=STEPS)


@pytest.mark.parametrize(
    "point",
    [
        "opened",
        "loaded",
        "replayed",
        *(pytest.param(point, marks=pytest.mark.long) for point in ("join", "entering", "claimed", "fetched", "batch")),
    ],
)
def test_a_joiner_that_dies_on_the_way_does_no_harm_and_is_followed_by_another_P1(
    replaced: Replaced, point: str
) -> None:
    job = replaced.start(faults=[Fault(point="update", step=5, worker="w1"), Fault(point=point, worker="w3")])
    result = replaced.finish(job, joined=1)
    assert len(result.struck) == 2, describe(result)
    result.assert_exact(replaced.reference(), faults=2, steps=STEPS)
    assert "w4" in {line["worker_id"] for line in result.events("WorkerFinished")}


@pytest.mark.parametrize(
    "point",
    [
        "staged",
        "committed",
        *(pytest.param(point, marks=pytest.mark.long) for point in ("batch", "before_acknowledge", "update")),
    ],
)
def test_a_donor_that_dies_while_it_hands_over_its_state_is_replaced_by_another_P1_P3(
    replaced: Replaced, point: str
) -> None:
    """The first donor to reach the point after the joiner came dies there."""
    faults = [Fault(point="update", step=5, worker="w1"), Fault(point="staged", worker="w0")]
    if point != "staged":
        # Not at once, but at this point of the step whose exchange the joiner follows.
        faults[1] = Fault(point=point, worker="w0", after_file="joined")
    job = replaced.start(faults=faults)
    if point != "staged":
        wait_for(lambda: any(line.get("action") == "Propose" for line in job.journal()), "the joiner is expected")
        (job.run_dir / "joined").touch()
    result = replaced.finish(job, joined=1)
    assert len(result.struck) == 2, describe(result)
    result.assert_exact(replaced.reference(), faults=2, steps=STEPS)


def test_a_replacement_fetches_its_data_with_loader_processes_P1_P2(replaced: Replaced) -> None:
    job = replaced.start("--loaders", "1")
    job.reach_step(5)
    job.kill("w2")
    replaced.finish(job, joined=1).assert_exact(replaced.reference(), faults=1, steps=STEPS)


def test_large_messages_are_replayed_too_P1(replaced: Replaced) -> None:
    job = replaced.start("--width", "700")
    job.reach_step(5)
    job.kill("w0")
    replaced.finish(job, joined=1).assert_exact(replaced.reference("--width", "700"), faults=1, steps=STEPS)


def test_workers_that_keep_dying_young_are_not_replaced_for_ever(replaced: Replaced) -> None:
    """Each latecomer dies as it joins; the survivors go on without, and it is said why."""
    faults = [Fault(point="update", step=5, worker="w1")]
    faults += [Fault(point="join", worker=f"w{number}") for number in range(3, 6)]
    job = replaced.start(faults=faults, environment={"CRAFT_MAX_RESTARTS": "3"})
    wait_for(lambda: any(line.get("event") == "ReplacementsEnded" for line in job.journal()), "it gives up")
    result = replaced.finish(job)
    result.assert_exact(replaced.reference(), faults=4, steps=STEPS)
    assert "does not replace lost workers any more: --max-restarts is 3" in result.output


def test_a_job_whose_state_is_lost_everywhere_is_given_up(replaced: Replaced) -> None:
    job = replaced.start(workers=2)
    job.reach_step(5)
    job.kill("w0", "w1")
    result = job.wait()
    assert result.exit_code == 3, describe(result)
    assert "no worker is left" in result.output or "training state" in result.output


def test_a_latecomer_that_raises_before_its_first_step_does_not_stop_the_job(replaced: Replaced) -> None:
    faults = [Fault(point="update", step=5, worker="w1"), Fault(point="join", worker="w3", kind="raise")]
    result = replaced.finish(replaced.start(faults=faults), joined=1)
    result.assert_exact(replaced.reference(), faults=2, steps=STEPS)


# Spares, and waiting.


def test_a_job_that_is_done_does_not_wait_for_one_that_is_still_starting(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    """A script may read data for minutes before it joins: in vain, once the others are done."""
    script, began = tmp_path / "reads.py", tmp_path / "began"
    reads = f"if os.environ['CRAFT_WORKER_ID'] == 'w2':\n    open({str(began)!r}, 'w').close()\n    time.sleep(600)\n"
    script.write_text(f"import os, runpy, time\n{reads}runpy.run_path({str(TRAIN)!r}, run_name='__main__')\n")
    steps, hurry = ("--steps", "100"), tmp_path / "hurry"
    job = jobs.start(script, *steps, "--slow-until", str(hurry), workers=2, environment=REPLACE)
    job.reach_step(3)
    job.kill("w1")
    wait_for(began.exists, "another one is started")
    hurry.touch()
    result = job.wait()
    result.assert_exact(references.digest(*steps, workers=1), faults=1)
    assert [lost["worker_id"] for lost in result.events("WorkerLost")] == ["w1"], describe(result)


def test_a_spare_takes_the_slot_of_a_lost_worker_in_the_very_next_generation_P1(replaced: Replaced) -> None:
    job = replaced.start(options=("--spares", "1"))
    job.reach_step(5)
    wait_for(lambda: "w3" in job.pids(), "the spare has joined")
    job.kill("w1")
    result = replaced.finish(job, joined=1)
    result.assert_exact(replaced.reference(), faults=1, steps=STEPS)
    second = [line for line in result.run.journal if line.get("action") == "Reconfigure"][1]
    assert second["members"] == ["w0", "w2", "w3"]
    assert "w3 takes the slot" in second["reason"]


def test_a_spare_that_is_never_needed_ends_with_the_job(replaced: Replaced) -> None:
    result = replaced.finish(replaced.start(options=("--spares", "2"), workers=2))
    result.assert_exact(replaced.reference(), faults=0, steps=STEPS)


def test_with_wait_the_replacement_computes_what_the_lost_worker_would_have_P1(replaced: Replaced) -> None:
    job = replaced.start(options=("--on-loss", "wait"))
    job.reach_step(5)
    job.kill("w1")
    result = replaced.finish(job, joined=1)
    result.assert_exact(replaced.reference(), faults=1, steps=STEPS)
    assert {commit.world_size for commits in result.run.commits.values() for commit in commits} == {3}
    retried = result.events("StepRetried")
    assert len(retried) <= 1
    first = result.run.commits["w3"][0]
    assert not retried or set(first.microbatches) == set(retried[0]["given"])


@pytest.mark.long
def test_with_wait_two_that_come_for_one_microbatch_hold_nobody_up_P1(jobs: Jobs, references: References) -> None:
    """With fewer microbatches than workers, one of them computes nothing, and yet keeps pace at once."""
    sizes = ("--steps", "30", "--microbatches", "2")
    result = jobs.run(
        TRAIN, *sizes,
        workers=3,
        options=("--on-loss", "wait", "--spares", "2"),
        # The second one dies on its way into the generation in which somebody takes the place of the first.
        faults=[Fault(point="forward", step=5, worker="w1"), Fault(point="entering", step=5, worker="w2")],
        environment=REPLACE,
    )  # fmt: skip
    assert len(result.struck) == 2, describe(result)
    result.assert_exact(references.digest(*sizes, workers=1), faults=2, steps=30)
    made = [line for line in result.run.journal if line.get("action") == "Reconfigure"]
    assert not any(line["again"] for line in made), "they waited for each other" + describe(result)


def test_with_wait_and_nobody_to_come_the_survivors_go_on(replaced: Replaced) -> None:
    job = replaced.start(options=("--on-loss", "wait"), environment={"CRAFT_MAX_RESTARTS": "1"})
    job.reach_step(5)
    job.kill("w1")
    job.wait_for_committing(4)
    job.kill("w2")
    replaced.finish(job).assert_exact(replaced.reference(), faults=2, steps=STEPS)


def test_below_the_least_number_a_replacement_is_waited_for_P1(replaced: Replaced) -> None:
    job = replaced.start(options=("--min-workers", "3"))
    job.reach_step(5)
    job.kill("w0")
    result = replaced.finish(job, joined=1)
    result.assert_exact(replaced.reference(), faults=1, steps=STEPS)
    assert any(line.get("action") == "Hold" for line in result.run.journal)


# Drains.


def test_a_drained_worker_leaves_at_a_step_boundary_with_nothing_lost_or_redone_P1_P2(replaced: Replaced) -> None:
    job = replaced.start()
    job.reach_step(5)
    answer = job.client.drain(worker_id="w1", reason="a loud fan")
    assert [action["action"] for action in answer["actions"]] == ["Drain", "Propose"]
    wait_for(lambda: "w1" not in job.pids(), "it has left")
    result = replaced.finish(job)
    result.assert_exact(replaced.reference(), faults=0, steps=STEPS)
    assert result.events("StepRetried") == []
    assert [line["worker_id"] for line in result.events("WorkerLeft")] == ["w1"]
    assert {line["worker_id"] for line in result.events("WorkerFinished")} == {"w0", "w2"}


def test_with_a_spare_a_drain_is_a_live_migration_P1(replaced: Replaced) -> None:
    job = replaced.start(options=("--spares", "1"))
    job.reach_step(5)
    wait_for(lambda: "w3" in job.pids(), "the spare has joined")
    job.client.drain(worker_id="w0")
    result = replaced.finish(job, joined=1)
    result.assert_exact(replaced.reference(), faults=0, steps=STEPS)
    assert result.events("StepRetried") == []
    sizes = {commit.world_size for commits in result.run.commits.values() for commit in commits}
    assert sizes == {3}


def test_a_worker_that_does_not_leave_by_its_deadline_is_treated_as_lost_P1(replaced: Replaced) -> None:
    """It is stopped, so that it cannot come to a step boundary; the watchdog is told to be patient."""
    job = replaced.start(environment={"CRAFT_STOP_LIMIT_S": "60"})
    job.reach_step(5)
    psutil.Process(job.pids()["w1"]).suspend()
    job.client.drain(worker_id="w1", deadline_s=0.5)
    result = replaced.finish(job, joined=1)
    result.assert_exact(replaced.reference(), faults=1, steps=STEPS)
    assert "still there at its deadline" in result.events("WorkerLost")[0]["reason"]


def test_a_worker_killed_while_another_is_drained_P1_P3(replaced: Replaced) -> None:
    # Each round takes two and brings one: in the second one somebody must be left who has the state.
    job = replaced.start(workers=4)
    for number in range(2):
        job.reach_step(6 * (number + 1))
        workers = job.client.get_status()["workers"]
        victim, leaver = [each["worker_id"] for each in workers if each["state"] == "member"][:2]
        job.client.drain(worker_id=leaver)
        time.sleep(0.02 * number)
        job.kill(victim)
        job.wait_for_committing(len(job.committing()) + 1)
    replaced.finish(job).assert_exact(replaced.reference(), faults=2, steps=STEPS)


# Hosts that come to a job on its way.


def test_a_host_that_comes_later_and_whose_script_fails_does_not_end_the_job_P1(
    replaced: Replaced, jobs: Jobs, tmp_path: Path
) -> None:
    """Its workers are not those that the others waited for, though its agent starts them as its first."""
    script = tmp_path / "unmounted.py"
    script.write_text("raise FileNotFoundError('/data')\n")
    job = replaced.start()
    job.reach_step(5)
    address = (
        "--lighthouse",
        (job.run_dir / "address").read_text().strip(),
        "--token-file",
        str(job.run_dir / "token"),
    )
    other = jobs.start(script, workers=1, options=address, environment={"CRAFT_HOST": "other"})
    wait_for(lambda: "FileNotFoundError" in (job.run_dir / "journal.jsonl").read_text(), "it has failed")
    job.reach_step(job.steps() + 5)
    result = replaced.finish(job)
    result.assert_exact(replaced.reference(), faults=1, steps=STEPS)
    assert [line["late"] for line in result.events("WorkerFailed")] == [True]
    other.wait()
