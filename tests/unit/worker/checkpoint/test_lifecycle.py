"""The checkpoints of one loop on one worker: going back after a divergence, what travels with the state, what is compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from craft.decide.techniques import Divergence
from craft.decide.techniques.technique import Chosen
from craft.protocol.errors import BitsDiffer, LeftBehind, Refused
from craft.protocol.events import NumbersDiverged, RolledBack
from craft.settings.techniques import alone as defaults
from craft.settings.techniques import to_json
from craft.snapshots.checkpoint.suspect import SuspectCheckpoints
from craft.snapshots.store.tiers import open_tiers
from craft.worker.api.job import Job
from craft.worker.checkpoint.lifecycle import CheckpointLifecycle
from craft.worker.state.metadata import TrainingProgress

from ..alone import alone, dataset, loss_of, model


def rolling_back() -> str:
    chosen = [each for each in defaults().by_name.values() if each.name != Divergence.name]
    return to_json(Chosen([*chosen, Divergence(Divergence.Settings(answer="rollback"))]))


class Trained:
    """A job that goes back if a number is not finite; in ``bad`` steps it is not, once."""

    def __init__(self, store: Path, bad: set[int]) -> None:
        self.job: Job = alone(check_script=False, check_bits=False, techniques=rolling_back())
        self.job.checkpoints(store, every="3 steps")
        self.net = self.job.replicate(model())
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.job.register(optimizer=optimizer)
        self.diverged: list[NumbersDiverged] = []
        self.rolled_back: list[RolledBack] = []
        self.job.on(NumbersDiverged, self.diverged.append)
        self.job.on(RolledBack, self.rolled_back.append)
        self.numbers: list[int] = []
        self.samples: list[int] = []
        data = [(index, *sample) for index, sample in enumerate(dataset(40))]
        for step in self.job.steps(data, global_batch=2, microbatches=1, steps=9, shuffle=False):
            lifecycle = lifecycle_of(self.job)
            assert lifecycle.scheduler is not None
            # Written before the next one is due: a step here is very short.
            lifecycle.scheduler.finish()
            optimizer.zero_grad()
            for index, x, y in step:
                self.samples += index.tolist()
                loss = loss_of(self.net, (x, y))
                torch.autograd.backward(loss * (float("nan") if step.number in bad else 1.0))
            bad -= {step.number}
            if all(param.grad is not None for param in self.net.parameters()):
                optimizer.step()
            self.numbers.append(step.number)


def lifecycle_of(job: Job) -> CheckpointLifecycle:
    assert job._training is not None
    return job._training.lifecycle


def test_a_job_that_diverges_goes_back_and_leaves_out_the_data_since_P2_P3(tmp_path: Path) -> None:
    trained = Trained(tmp_path, {4})
    assert trained.numbers == [0, 1, 2, 3, 4, 3, 4, 5, 6, 7, 8]
    assert [(each.step, each.left_at, each.skipped, each.branch) for each in trained.rolled_back] == [(3, 5, 2, 1)]
    assert trained.samples == list(range(2 * len(trained.numbers))), "the data goes on where it was, none of it twice"
    assert trained.job.branch == 1 and trained.job.step == 9
    assert all(torch.isfinite(param).all() for param in trained.net.parameters())


def test_without_a_checkpoint_the_step_changes_nothing(tmp_path: Path) -> None:
    trained = Trained(tmp_path, {1})
    assert trained.numbers == list(range(9)) and not trained.rolled_back and len(trained.diverged) == 1
    assert all(torch.isfinite(param).all() for param in trained.net.parameters())


def begun(store: Path | None = None, **settings: Any) -> tuple[Job, CheckpointLifecycle]:
    job = alone(check_script=False, **settings)
    job.replicate(model())
    if store is not None:
        job.checkpoints(store, every="1000 steps")
    job.steps(dataset(8), global_batch=2, steps=4)
    return job, lifecycle_of(job)


def test_what_a_state_brings_along_is_taken_over_and_passed_on() -> None:
    _, lifecycle = begun()
    lifecycle.take(TrainingProgress(skipped=3, lowered_until=7, recent=(1.0, 2.0), stop="enough"))
    passed_on = lifecycle.attached.progress
    assert (passed_on.skipped, passed_on.lowered_until, passed_on.recent, passed_on.stop) == (
        3,
        7,
        (1.0, 2.0),
        "enough",
    )


def test_a_resume_without_a_place_is_refused() -> None:
    job = alone(resume="auto")
    job.replicate(model())
    with pytest.raises(Refused, match="from where"):
        next(iter(job.steps(dataset(8), global_batch=2, steps=4)))


def test_a_difference_makes_later_checkpoints_suspect_before_the_job_ends(tmp_path: Path) -> None:
    _, lifecycle = begun(tmp_path)
    lifecycle._agreement.begin(2)
    lifecycle.differs(BitsDiffer("bits differ"), 6)
    (doubt,) = SuspectCheckpoints(open_tiers(str(tmp_path)).nearest_first)._found
    assert (doubt.branch, doubt.after, doubt.step) == (0, 2, 6) and "bits differ" in doubt.reason


def test_a_worker_that_is_catching_up_cannot_go_back_with_the_others(tmp_path: Path) -> None:
    job, lifecycle = begun(tmp_path, techniques=rolling_back())
    layout = job._training.exchange.gradients.layout  # type: ignore[union-attr]
    lifecycle.numbers.check(0, (("loss", float("nan")),), layout, [])
    assert lifecycle.numbers.goes_back
    with pytest.raises(LeftBehind, match="another one will come"):
        lifecycle.at_boundary(behind=True, regroup=lambda: None)


def test_a_loop_without_checkpoints_says_nothing_about_them() -> None:
    _, lifecycle = begun()
    assert lifecycle.word_part(3).save is None and lifecycle.scheduler is None
    assert not lifecycle.follow()
    lifecycle.at_boundary(behind=False, regroup=lambda: None)
    assert not lifecycle.saved
