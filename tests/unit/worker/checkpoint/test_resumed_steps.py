"""The first steps after a checkpoint are kept in its store, and compared by a job that goes on from there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from craft.snapshots.checkpoint import next_steps
from craft.snapshots.checkpoint.next_steps import NextSteps
from craft.snapshots.state.leaves import Leaf
from craft.snapshots.store.store import Store
from craft.snapshots.store.tiers import open_tiers
from craft.worker.checkpoint.earlier_results import COUNT, ResumedSteps


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_tiers(str(tmp_path / "store")).durable


class Trained:
    """A job of one tensor, which counts its steps."""

    def __init__(self, store: Store, step: int = 0, drift: float = 0.0) -> None:
        self.weight = torch.full((4,), float(step))
        self.step = step
        self.drift = drift
        self.steps = ResumedSteps(store, lambda: [Leaf("weight", self.weight)])

    def train(self, count: int, leads: bool = True) -> list[str]:
        """Return what was wrong."""
        found = []
        for _ in range(count):
            self.step += 1
            self.weight = self.weight + 1.0 + self.drift
            found.append(self.steps.at_boundary(self.step, leads))
            self.steps.close()
        return [each for each in found if each is not None]


def first_run(store: Store, steps: int = 9) -> None:
    job = Trained(store)
    job.train(4)
    job.steps.saved(0, 4)
    assert job.train(steps - 4) == []


def resumed(store: Store, drift: float = 0.0) -> Trained:
    job = Trained(store, 4, drift)
    job.steps.restored(0, 4)
    return job


def test_a_job_that_goes_on_from_a_checkpoint_and_does_the_same_is_left_alone(store: Store) -> None:
    first_run(store)
    kept = next_steps.read(store, 0, 4)
    assert kept is not None and sorted(kept.digests) == [5, 6, 7]

    assert resumed(store).train(9) == []


def test_another_state_is_found_after_the_first_step(store: Store) -> None:
    first_run(store)

    wrong = resumed(store, drift=0.5).train(9)

    assert len(wrong) == COUNT
    assert wrong[0].startswith(
        "step 4 was computed again from the checkpoint of step 4, by the same script, and left another"
    )
    assert "job.register_state" in wrong[0] and "--no-check-bits" in wrong[0]


def test_it_is_known_whether_the_script_is_the_same(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first_run(store)
    assert resumed(store).steps.same_script

    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])
    job = resumed(store, drift=0.5)

    assert not job.steps.same_script
    assert "by another version of the script, or other arguments" in job.train(1)[0]


def test_a_job_that_was_cut_off_early_is_compared_as_far_as_it_came(store: Store) -> None:
    first_run(store, steps=5)
    kept = next_steps.read(store, 0, 4)

    assert kept is not None and sorted(kept.digests) == [5]
    assert len(resumed(store, drift=0.5).train(9)) == 1


def test_only_the_leader_writes(store: Store) -> None:
    job = Trained(store)
    job.steps.saved(0, 0)
    job.train(5, leads=False)

    assert next_steps.read(store, 0, 0) is None


def test_some_checkpoints_of_a_branch_are_kept_apart_from_other_branches(store: Store) -> None:
    for branch in (0, 1):
        for step in range(12):
            next_steps.keep(store, branch, NextSteps(step=step, script="", digests={step + 1: f"{branch}"}))

    assert [step for step in range(12) if next_steps.read(store, 1, step) is not None] == [4, 5, 6, 7, 8, 9, 10, 11]
    found = next_steps.read(store, 0, 11)
    assert found is not None and found.digests == {12: "0"}


def test_a_damaged_file_is_left_out_with_a_warning(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    first_run(store)
    data = store.get("next/0000.json")
    store.put("next/0000.json", data.replace(b'"step":4', b'"step":5'))

    assert resumed(store, drift=0.5).train(5) == []
    assert "next/0000.json is damaged and left out" in caplog.text
