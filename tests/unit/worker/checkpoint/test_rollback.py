"""Beginning from a checkpoint: which one is taken, by all workers alike, and which job is refused."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from craft.groups.gloo import GlooGroup
from craft.protocol.errors import Refused
from craft.protocol.events import CheckpointRejected, CheckpointRestored
from craft.snapshots.checkpoint.catalog import candidates
from craft.snapshots.checkpoint.sharded.reshard import Target
from craft.snapshots.checkpoint.suspect import Suspicion, mark
from craft.snapshots.store.manifest import Manifest, chunk_path, manifest_path
from craft.snapshots.store.tiers import open_tiers
from craft.worker.api.job import Job
from craft.worker.checkpoint.candidates import RollbackCandidates
from craft.worker.checkpoint.rollback import Rollback

from ..alone import alone, dataset, model, train
from ..members import together
from ..noting import Noting
from ..reducing import Reducing

STEPS = 8


class Trained:
    """A job of one worker that takes a checkpoint after every two steps."""

    def __init__(self, store: Path, steps: int = STEPS, resume: str | None = None, seed: int = 0, **more: Any) -> None:
        self.job: Job = alone(resume=resume, check_script=False)
        self.job.checkpoints(store, every="2 steps", keep=99)
        self.net = self.job.replicate(model())
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.job.register(optimizer=self.optimizer)
        self.restored: list[CheckpointRestored] = []
        self.job.on(CheckpointRestored, self.restored.append)
        self.numbers: list[int] = []
        for step in self.job.steps(dataset(16), global_batch=4, microbatches=2, steps=steps, seed=seed, **more):
            training = self.job._training
            assert training is not None and training.lifecycle.scheduler is not None
            # A step is so short that the next checkpoint would find this one still being written.
            training.lifecycle.scheduler.finish()
            self.optimizer.zero_grad()
            for batch in step:
                train(self.net, batch)
            self.optimizer.step()
            self.numbers.append(step.number)

    def equals(self, other: Trained) -> bool:
        pairs = zip(self.net.parameters(), other.net.parameters(), strict=True)
        return all(torch.equal(one, another) for one, another in pairs)


def listed(store: Path) -> list[Manifest]:
    return candidates(open_tiers(str(store)))


def test_a_job_goes_on_from_the_newest_one_with_the_same_bits_P1(tmp_path: Path) -> None:
    Trained(tmp_path / "store", steps=5)
    whole, rest = Trained(tmp_path / "other"), Trained(tmp_path / "store", resume="auto")
    assert rest.numbers == [5, 6, 7], "the end of a loop has one, too"
    assert [(each.branch, each.step) for each in rest.restored] == [(0, 5)]
    assert rest.equals(whole)


def test_a_named_step_begins_a_branch_beside_what_came_after_it_P3(tmp_path: Path) -> None:
    whole = Trained(tmp_path)
    again = Trained(tmp_path, resume="4")
    assert again.numbers == [4, 5, 6, 7] and again.job.branch == 1 and again.equals(whole)
    assert {each.branch for each in listed(tmp_path) if each.step > 4} == {0, 1}


def test_one_with_a_damaged_chunk_is_rejected_and_the_one_before_it_is_used_P7(tmp_path: Path) -> None:
    whole = Trained(tmp_path)
    newest, *older = listed(tmp_path)
    shared = {chunk.hash for each in older for chunk in each.chunks}
    own = next(chunk for chunk in newest.chunks if chunk.hash not in shared)
    (tmp_path / chunk_path(own.hash)).write_bytes(bytes(own.size))
    again = Trained(tmp_path, resume="auto")
    assert again.numbers == [6, 7] and again.equals(whole)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seed": 3, "resume": "auto"}, "the checkpoint is of a job with seed=0, and this one has seed=3"),
        ({"resume": "7"}, "--resume 7: there is no checkpoint of step 7 .*; there are: 8, 6, 4, 2"),
        ({}, "holds checkpoints already, the newest of step 8: go on from there"),
    ],
)
def test_another_job_is_refused_with_a_sentence(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    Trained(tmp_path)
    with pytest.raises(Refused, match=sentence):
        Trained(tmp_path, **change)


def test_a_job_that_resumes_where_there_is_nothing_begins_anew(tmp_path: Path) -> None:
    assert Trained(tmp_path, resume="auto").numbers == list(range(STEPS))


def test_one_that_cannot_be_read_is_no_reason_to_begin_anew(tmp_path: Path) -> None:
    Trained(tmp_path)
    for each in listed(tmp_path):
        path = tmp_path / manifest_path(each.name)
        path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(Refused, match="repair or remove what is there"):
        Trained(tmp_path, resume="auto")


def test_those_after_a_difference_are_used_only_if_the_user_names_one_P3(tmp_path: Path) -> None:
    Trained(tmp_path)
    mark(open_tiers(str(tmp_path)).nearest_first, Suspicion(branch=0, after=4, step=7, reason="a bit flipped"))
    assert Trained(tmp_path, resume="auto").numbers[0] == 4
    assert Trained(tmp_path, resume="6").numbers[0] == 6


def test_a_script_that_is_further_than_any_checkpoint_goes_on_from_its_own_file(tmp_path: Path) -> None:
    Trained(tmp_path, steps=2)
    later = Trained(tmp_path, resume="auto", start_step=6)
    assert later.numbers == [6, 7] and not later.restored


# Between two workers.


@pytest.mark.parametrize(
    ("hidden", "back_to", "problem"),
    [
        # The one of two steps is beside a newer one that is lost to them: another branch.
        (1, (1, 2), None),
        (2, None, "none of the 2 checkpoints in .* can be used .*w1 does not find it"),
    ],
)
def test_one_that_a_member_does_not_find_is_used_by_no_member(
    tmp_path: Path, hidden: int, back_to: tuple[int, int] | None, problem: str | None
) -> None:
    """P3: all begin from the same state, the newest that every one can read."""
    trained = Trained(tmp_path / "store", steps=4)
    shutil.copytree(tmp_path / "store", tmp_path / "other")
    # The file system of the second worker does not show the newest.
    for each in listed(tmp_path / "store")[:hidden]:
        (tmp_path / "other" / manifest_path(each.name)).unlink()
    training = trained.job._training
    assert training is not None

    def act(group: GlooGroup) -> None:
        worker = Reducing(group, "ab")
        worker.begin(0, (), 2)
        participant = worker.participant
        reporter = Noting(worker.worker_id, participant._membership)
        tiers = open_tiers(str(tmp_path / ("other" if group.rank else "store")))
        found = RollbackCandidates(tiers, participant, reporter)
        rollback = Rollback(tiers, found, participant, Target({}, {}), training.lifecycle.attached)
        said = rollback.prepare(None, next_branch=False)
        results[group.rank] = participant.ledger.rewind_to, said
        rejected[group.rank] = [each.reason for each in reporter.noted if isinstance(each, CheckpointRejected)]

    results: dict[int, tuple[tuple[int, int] | None, str | None]] = {}
    rejected: dict[int, list[str]] = {}
    together(2, act)
    for found, said in results.values():
        assert found == back_to
        assert said is None if problem is None else said is not None and re.match(problem, said)
    assert rejected == {0: ["worker w1 does not find it"] * hidden, 1: []}, "the leader reports it for all"
