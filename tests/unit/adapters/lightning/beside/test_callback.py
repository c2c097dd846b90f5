"""Techniques beside a strategy of Lightning's own, in fits of a real trainer."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from craft.decide.techniques import Divergence, DivergenceSettings, Preemption, PreemptionSettings
from craft.protocol.errors import ConfigError
from craft.techniques import Hooks, JobState, Moment, Policy, Surroundings, Technique, actions, events

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def pl(request: pytest.FixtureRequest) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(request.param)


def callback(pl: Any, *techniques: Any, dirpath: Path) -> Any:
    from craft.adapters.lightning.beside.callback import callback_class

    return callback_class(pl.__name__)(techniques, dirpath=str(dirpath))


def fit(pl: Any, *callbacks: Any, nan_at: int = -1) -> tuple[Any, list[float]]:
    """Eight steps with two microbatches each; returns the trainer, and the weight after each step."""
    weights = []

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = self.layer(batch[0]).sum()
            return loss * float("nan") if self.trainer.global_step == nan_at else loss  # type: ignore[no-any-return]

        def on_train_batch_end(self, *_: Any) -> None:
            weights.append(float(self.layer.weight))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, accumulate_grad_batches=2, callbacks=list(callbacks),
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(TensorDataset(torch.ones(16, 1)), batch_size=1))
    return trainer, weights[1::2]


class Odd(Technique[Any]):
    """Notices step 3, and answers with whatever it was made with."""

    name = "odd"
    summary = "for tests"

    def __init__(self, *answer: actions.AnyAction) -> None:
        super().__init__(Technique.Settings())
        self.answer = answer
        self.points_seen: list[str] = []

    def hooks(self, surroundings: Surroundings) -> Hooks:
        technique = self

        class Seen(Hooks):
            def batch_start(self, moment: Moment) -> None:
                technique.points_seen.append(f"batch_start {moment.microbatch}")

            def after_backward(self, moment: Moment) -> None:
                technique.points_seen.append("after_backward")

            def before_commit(self, moment: Moment) -> None:
                technique.points_seen.append("before_commit")

            def after_commit(self, moment: Moment) -> None:
                technique.points_seen.append("after_commit")
                if moment.step == 3:
                    surroundings.tell("three", 3.0)

        return Seen()

    def policies(self) -> Sequence[Policy]:
        technique = self

        class Answers:
            def decide(self, state: JobState, event: events.AnyEvent) -> tuple[actions.AnyAction, ...]:
                return technique.answer if isinstance(event, events.ConditionSeen) else ()

        return (Answers(),)


def test_hooks_are_called_at_the_safe_points_of_a_step(pl: Any, tmp_path: Path) -> None:
    odd = Odd()
    fit(pl, callback(pl, odd, dirpath=tmp_path))
    one_step = ["batch_start 0", "after_backward", "batch_start 1", "after_backward", "before_commit", "after_commit"]
    assert odd.points_seen == one_step * 8


def test_a_checkpoint_that_a_policy_asks_for_is_taken_after_the_step(pl: Any, tmp_path: Path) -> None:
    trainer, _ = fit(pl, callback(pl, Odd(actions.TakeCheckpoint(reason="three")), dirpath=tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["step=3.ckpt"]
    assert trainer.global_step == 8


def test_a_worker_that_is_to_leave_ends_the_fit_with_a_checkpoint(pl: Any, tmp_path: Path) -> None:
    drain = actions.RequestDrain(worker_id="rank0", reason="hot")
    trainer, _ = fit(pl, callback(pl, Odd(drain), dirpath=tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["step=3.ckpt"]
    assert trainer.global_step == 3


def test_what_only_a_job_can_do_is_said_and_the_fit_goes_on(
    pl: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lost = actions.DeclareLost(worker_id="rank0", source="odd", reason="gone")
    trainer, _ = fit(pl, callback(pl, Odd(lost), dirpath=tmp_path))
    assert 'technique odd wants DeclareLost (gone), which needs strategy="craft"' in caplog.text
    assert trainer.global_step == 8


def test_a_step_with_gradients_that_are_not_finite_changes_nothing_if_that_is_the_answer(
    pl: Any, tmp_path: Path
) -> None:
    skip = Divergence(DivergenceSettings(answer="skip"))
    _, weights = fit(pl, callback(pl, skip, dirpath=tmp_path), nan_at=4)
    assert weights[4] == weights[3] and weights[5] < weights[4]


def test_a_file_that_appears_ends_the_fit_with_a_checkpoint(pl: Any, tmp_path: Path) -> None:
    (tmp_path / "now").touch()
    preemption = Preemption(PreemptionSettings(file=str(tmp_path / "now")))
    trainer, _ = fit(pl, callback(pl, preemption, dirpath=tmp_path / "store"))
    assert [file.name for file in (tmp_path / "store").iterdir()] == ["step=1.ckpt"]
    assert trainer.global_step == 1


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ("loss", "technique loss needs a job of CRAFT's"),
        ("nonsense", "there is no technique 'nonsense'"),
        (Divergence(DivergenceSettings(answer="rollback")), "rollback needs a job of CRAFT's"),
    ],
)
def test_what_cannot_work_here_is_refused(pl: Any, tmp_path: Path, wanted: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        callback(pl, wanted, dirpath=tmp_path)
