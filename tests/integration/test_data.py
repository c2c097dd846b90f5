"""P2 on real jobs: which samples were in which committed step, for datasets, loaders and streams, and how loops end."""

from __future__ import annotations

import re
from collections import Counter
from statistics import fmean

import pytest

from craft.settings.rundir import RunDir
from craft.telemetry.history import Commit
from craft.telemetry.records.journal import read_lines
from craft.testing.faults import PlacedFault
from craft.worker.data.sample_order import SampleOrder

from .jobs import SCRIPTS, Jobs, Result, describe

DATA = SCRIPTS / "data"

Place = tuple[int, int]
"""(step, microbatch)"""


def plans(result: Result) -> dict[int, dict[int, str | None]]:
    """For each committed step, who computed which of its microbatches; the same on every worker that committed it."""
    found: dict[int, dict[int, str | None]] = {}
    commits: list[Commit] = [commit for commits in result.run.commits.values() for commit in commits]
    for commit in commits:
        assert found.setdefault(commit.step, commit.plan) == commit.plan, describe(result)
    return found


def used(result: Result) -> dict[Place, list[str]]:
    """What the script was given for each microbatch that counted, as said by the worker that computed it."""
    said: dict[tuple[str, int, int], list[str]] = {}
    for log in result.run_dir.glob("workers/*/log"):
        for step, microbatch, what in re.findall(r"^used (\d+) (\d+) (.*)$", log.read_text(), re.MULTILINE):
            said.setdefault((log.parent.name, int(step), int(microbatch)), []).append(what)
    return {
        (step, microbatch): said.get((str(owner), step, microbatch), [])
        for step, plan in plans(result).items()
        for microbatch, owner in plan.items()
    }


def means(result: Result) -> list[float]:
    return [line["mean"] for line in read_lines(RunDir(result.run_dir).metrics)]


def assert_ended(result: Result, steps: int) -> None:
    """Every worker that finished did so after the same step."""
    assert result.exit_code == 0, describe(result)
    finished = result.events("WorkerFinished")
    assert {(line["step"], line["complete"]) for line in finished} == {(steps, True)}, describe(result)
    for line in finished:
        assert f"ended after {steps} steps" in RunDir(result.run_dir).log(line["worker_id"]).read_text()


def assert_in_order(result: Result, order: SampleOrder, steps: int) -> None:
    """P2: the committed steps hold exactly the samples of the order, by the plan, by what scripts saw and by the mean."""
    by_plan = plans(result)
    assert sorted(by_plan) == list(range(steps))
    assert all(sorted(plan) == list(range(order.size_of(step))) for step, plan in by_plan.items())
    for (step, microbatch), said in used(result).items():
        # Microbatch 0 of the first step is computed once more, to compare bits.
        assert set(said) == {str(list(order.samples_of(step, microbatch).indices))}, (step, microbatch)
    samples = [
        [index for microbatch in plan for index in order.samples_of(step, microbatch).indices]
        for step, plan in sorted(by_plan.items())
    ]
    assert means(result) == pytest.approx([fmean(indices) for indices in samples])


def test_every_sample_is_in_exactly_one_committed_step_of_a_pass_in_spite_of_a_loss(jobs: Jobs) -> None:
    """P2: 3 workers, 5 microbatches, 8 samples a step, 22 in all: nothing divides anything."""
    killed = PlacedFault(point="batch", worker="w1", step=2)
    result = jobs.run(DATA / "samples.py", "--microbatches", "5", workers=3, faults=[killed])
    order = SampleOrder(length=22, global_batch=8, microbatches=5, seed=0, shuffle=True, drop_last=False)

    assert_ended(result, 6)
    assert len(result.events("WorkerLost")) == 1
    assert_in_order(result, order, 6)
    for number in range(2):
        places = [(step, microbatch) for step, plan in plans(result).items() for microbatch in plan]
        samples = Counter(
            index
            for step, microbatch in places
            if step // 3 == number
            for index in order.samples_of(step, microbatch).indices
        )
        assert samples == Counter(range(22))


def test_a_loader_is_taken_over_and_more_workers_than_microbatches_share_the_result(jobs: Jobs) -> None:
    """Its batches are whole (drop_last), in their own order, over two passes and a half."""
    result = jobs.run(DATA / "samples.py", "--loader", "--microbatches", "2", workers=3)

    assert_ended(result, 5)
    order = SampleOrder(length=22, global_batch=8, microbatches=2, seed=0, shuffle=False, drop_last=True)
    assert_in_order(result, order, 5)
    assert len(result.digests) == 1
    idle = [commits for commits in result.run.commits.values() if all(not commit.microbatches for commit in commits)]
    assert [len(commits) for commits in idle] == [5]


def test_streams_of_unequal_length_are_used_up_item_by_item_in_spite_of_a_loss(jobs: Jobs) -> None:
    """P2: the end is agreed; a stream that has ended weighs nothing."""
    lengths = [4, 2, 6, 0, 3]
    killed = PlacedFault(point="batch", worker="w1", step=1)
    result = jobs.run(DATA / "streams.py", *map(str, lengths), workers=3, faults=[killed])

    assert_ended(result, max(lengths))
    assert len(result.events("WorkerLost")) == 1
    assert {place: set(said) for place, said in used(result).items()} == {
        (step, microbatch): {str(step)} if step < length else set()
        for step in range(max(lengths))
        for microbatch, length in enumerate(lengths)
    }
    assert means(result) == pytest.approx(
        [
            fmean(100 * microbatch + step for microbatch, length in enumerate(lengths) if step < length)
            for step in range(max(lengths))
        ]
    )


def test_streams_without_any_data_are_an_error(jobs: Jobs) -> None:
    result = jobs.run(DATA / "streams.py", "0", "0", workers=2)

    assert result.exit_code == 1, describe(result)
    assert "the stream ended before it gave any data: there is nothing to train on" in result.output


@pytest.mark.long
def test_steps_that_weigh_nothing_are_steps_like_any_other_at_any_worker_count_P1(jobs: Jobs) -> None:
    alone = jobs.run(DATA / "masked.py", workers=1)
    killed = PlacedFault(point="batch", worker="w0", step=5)
    disturbed = jobs.run(DATA / "masked.py", workers=3, faults=[killed])

    for result in (alone, disturbed):
        assert_ended(result, 6)
        assert not result.events("NumbersDiverged")
    assert len(disturbed.events("WorkerLost")) == 1
    assert alone.digests == disturbed.digests and len(alone.digests) == 1


@pytest.mark.parametrize(("how", "steps"), [("stop-inside", 4), ("stop-outside", 5)])
def test_a_stop_by_one_worker_ends_all_at_the_same_step(jobs: Jobs, how: str, steps: int) -> None:
    result = jobs.run(DATA / "ends.py", how, workers=3)

    assert_ended(result, steps)
    assert len(result.digests) == 1
    # As many microbatches as workers, where the script does not say.
    assert all(sorted(plan) == [0, 1, 2] for plan in plans(result).values())


def test_breaking_out_of_the_inner_loop_is_an_error_that_says_so(jobs: Jobs) -> None:
    result = jobs.run(DATA / "ends.py", "break-inner", workers=3)

    assert result.exit_code == 1, describe(result)
    assert (
        "step 3 was not iterated to its end: `for batch in step` must run until it stops by itself"
        " (step 3 failed on workers" in result.output
    ), describe(result)
    assert max(plans(result)) == 2


def test_what_cannot_be_taken_over_is_refused_before_the_first_step(jobs: Jobs) -> None:
    result = jobs.run(DATA / "refused.py", workers=2)

    assert result.exit_code == 1, describe(result)
    assert "the DataLoader has batch_size=None, so that its dataset gives whole batches" in result.output
    assert "before the first step" in result.output
    assert plans(result) == {}
