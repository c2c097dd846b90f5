"""Checkpoints while a job goes on: where they are written, when, and what goes wrong meanwhile (P1, P3, P7)."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.small_disk import mounted

from craft.testing import Fault

from .jobs import TRAIN, Jobs, References, describe, wait_for
from .stores import STEPS, into, manifests

# Where they are written.


def to_places(folder: Path, place: str) -> Path:
    """A script whose workers take checkpoints in places of their own, as hosts with disks of their own do."""
    script = folder / "train.py"
    joins = "job = craft.join()\n"
    text = TRAIN.read_text()
    assert text.count(joins) == 1
    choice = f"job.checkpoints({str(folder)!r} + '/' + str({place}), every='10 steps')\n"
    script.write_text(text.replace(joins, joins + choice))
    return script


def test_workers_that_do_not_see_one_place_are_refused_P7(jobs: Jobs, tmp_path: Path) -> None:
    result = jobs.run(to_places(tmp_path, "job.worker_id"), workers=2)
    assert result.exit_code == 2, describe(result)
    assert f"{tmp_path / 'w1'} of w1 is another place than that of w0" in result.output
    assert not list(tmp_path.glob("w*/parts/*"))


@pytest.mark.long
def test_a_job_that_was_taken_for_dead_leaves_the_place_to_the_one_that_goes_on_P1_P7(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    store, hurry = tmp_path / "store", tmp_path / "hurry"
    steps = ("--steps", "300")
    first = jobs.start(TRAIN, *steps, "--slow-until", str(hurry), workers=1, options=into(store))
    wait_for(lambda: manifests(store), "a checkpoint")
    second = jobs.run(TRAIN, *steps, workers=1, options=into(store, "--resume"))
    listed = manifests(store)
    hurry.touch()
    left = first.wait()

    reference = references.digest(*steps, workers=1)
    second.assert_exact(reference, faults=0)
    left.assert_exact(reference, faults=0)
    assert any("belongs to another job" in failed["error"] for failed in left.events("CheckpointFailed"))
    assert not left.events("CheckpointAbandoned")
    assert manifests(store) == listed


# While the job goes on.


@pytest.mark.long
def test_that_a_latecomer_writes_to_another_place_is_told_P7(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    """Training goes on; but nobody is to believe that there are checkpoints."""
    script, hurry = to_places(tmp_path, "job.worker_id == 'w2'"), tmp_path / "hurry"
    steps = ("--steps", "150")
    job = jobs.start(
        script, *steps, "--slow-until", str(hurry), workers=2, faults=[Fault(point="update", step=5, rank=1)],
        environment={"CRAFT_MAX_RESTARTS": "1"},
    )  # fmt: skip
    wait_for(lambda: "do all hosts see it?" in job.files.with_suffix(".out").read_text(), "it is told")
    hurry.touch()
    job.wait().assert_exact(references.digest(*steps, workers=1), faults=1)


def test_a_worker_that_dies_while_a_checkpoint_is_written_costs_no_more_than_that_checkpoint_P1_P7(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    # Where a disk is slow, some are left out: whichever is the second, and the second after that.
    faults = [
        Fault(point="saved", rank=1, occurrence=2),
        Fault(point="saved", rank=0, occurrence=2, after_file="struck/0"),
    ]
    result = jobs.run(TRAIN, *STEPS, "--slow-until", "run/struck/1", options=into(store), faults=faults)
    result.assert_exact(references.digest(*STEPS), faults=2)
    saved = [int(path.stem.split("-")[1]) for path in manifests(store)]
    assert saved[-1] == 60, "the last state is kept"
    abandoned = [event["step"] for event in result.events("CheckpointAbandoned")]
    written = [event["step"] for event in result.events("CheckpointWritten")]
    assert len(abandoned) <= 2
    late = result.events("CheckpointSkipped")
    for step in abandoned:
        assert late or any(step < other < step + 10 for other in written), "another one was taken soon"


@pytest.mark.long
def test_a_checkpoint_whose_member_is_lost_before_anybody_copies_is_taken_again_at_once_P7(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    """All have agreed on it in the word of the step, and the others commit that step without the lost one."""
    store = tmp_path / "store"
    faults = [Fault(point="before_acknowledge", step=19, rank=1)]
    result = jobs.run(TRAIN, *STEPS, options=into(store), faults=faults)
    result.assert_exact(references.digest(*STEPS), faults=1)
    written = [event["step"] for event in result.events("CheckpointWritten")]
    assert [event["step"] for event in result.events("CheckpointAbandoned")] == [20], describe(result)
    assert any(20 < step < 40 for step in written), describe(result)


def test_joiners_take_part_in_checkpoints(jobs: Jobs, references: References, tmp_path: Path) -> None:
    store = tmp_path / "store"
    result = jobs.run(
        TRAIN,
        *STEPS,
        options=("--checkpoints", str(store), "--checkpoint-every", "3 steps"),
        faults=[Fault(point="batch", step=8, rank=1)],
        environment={"CRAFT_MAX_RESTARTS": "5"},
    )
    result.assert_exact(references.digest(*STEPS), faults=1)
    assert int(manifests(store)[-1].stem.split("-")[1]) == 60


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for very little."""
    with mounted(tmp_path / "disk", "64k") as place:
        yield place


def test_a_full_disk_is_told_and_training_goes_on_P7(jobs: Jobs, references: References, small_disk: Path) -> None:
    steps, hurry = ("--steps", "200"), small_disk.with_name("hurry")
    job = jobs.start(TRAIN, *steps, "--slow-until", str(hurry), workers=2, options=into(small_disk / "store"))
    wait_for(lambda: [line for line in job.journal() if line.get("event") == "CheckpointFailed"], "it is told")
    failed = next(line for line in job.journal() if line.get("event") == "CheckpointFailed")
    assert "No space left" in failed["error"] and failed["retry_s"] is not None
    # There is room again: what could not be written is, or the next one.
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    hurry.touch()
    result = job.wait()
    result.assert_exact(references.digest(*steps, workers=2), faults=0)
    assert int(manifests(small_disk / "store")[-1].stem.split("-")[1]) == 200


TAGGED = """
import craft, torch
from craft.testing import reach
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = craft.join()
job.replicate(model)
job.register(optimizer=optimizer)
job.checkpoints({store!r}, every="5 steps", keep=2)
for step in job.steps([torch.ones(4) * i for i in range(64)], global_batch=8, microbatches=4, steps=40):
    optimizer.zero_grad()
    for x in step:
        model(x / 64).square().mean().backward()
    optimizer.step()
    if step.number in (3, 17):
        job.checkpoint(tag="best")
        job.checkpoint(tag="also")
        if job.rank == 0:
            print("weights", step.number + 1, model.weight.detach().numpy().tobytes().hex(), flush=True)
"""


def test_those_with_a_tag_are_of_the_moment_and_stay_while_others_go(jobs: Jobs, tmp_path: Path) -> None:
    store = tmp_path / "store"
    script = tmp_path / "train.py"
    script.write_text(TAGGED.format(store=str(store)))
    result = jobs.run(script, workers=3)
    assert result.exit_code == 0, describe(result)
    written = [(event["step"], event["tag"]) for event in result.events("CheckpointWritten")]
    assert {(4, "best"), (4, "also"), (18, "best"), (18, "also"), (40, None)} <= set(written)
    kept = [int(path.stem.split("-")[1]) for path in manifests(store)]
    # Where a disk is slow, most of those without one are left out.
    assert kept == sorted([4, 4, 18, 18, *sorted({step for step, tag in written if tag is None})[-2:]])


GATED = """
import time
from pathlib import Path
import craft, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
job = craft.join()
job.replicate(model)
for step in job.steps([torch.ones(4) * i for i in range(64)], global_batch=8, microbatches=4, steps=100000):
    for x in step:
        while step.number == 2 and not Path({gate!r}).exists():
            time.sleep(0.01)
        model(x / 64).square().mean().backward()
"""


def test_checkpoints_that_are_wanted_within_one_step_are_all_taken(jobs: Jobs, tmp_path: Path) -> None:
    store, gate, script = tmp_path / "store", tmp_path / "gate", tmp_path / "train.py"
    script.write_text(GATED.format(gate=str(gate)))
    job = jobs.start(script, workers=2, options=("--checkpoints", str(store), "--checkpoint-every", "1 h"))
    job.reach_step(2)
    for tag in ("first", None, "second"):
        job.client.checkpoint("asked", tag)
    gate.touch()

    def taken() -> list[tuple[int, str | None]]:
        return [(line["step"], line["tag"]) for line in job.journal() if line.get("event") == "CheckpointWritten"]

    wait_for(lambda: len(taken()) >= 3, "all are taken")
    assert [tag for _, tag in sorted(taken())] == ["first", None, "second"]
    # It was only put off.
    assert not [line for line in job.journal() if line.get("event") == "CheckpointSkipped"]
    job.end()
    assert len(manifests(store)) == 3


def test_how_often_is_chosen_from_what_it_costs_and_shown(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.start(
        TRAIN,
        "--steps",
        "100000",
        workers=2,
        options=("--checkpoints", str(tmp_path / "store"), "--checkpoint-every", "auto"),
    )
    job.reach_step(1)
    chosen = wait_for(
        lambda: [line for line in job.journal() if line.get("event") == "IntervalChosen"], "an interval is chosen"
    )
    assert 1.0 <= chosen[0]["interval_s"] < 3600 and "a checkpoint costs" in chosen[0]["reason"]
    status = job.client.get_status()
    assert status["checkpoints"]["interval_s"] and "failures are taken to be" in status["checkpoints"]["reason"]
    job.end()
