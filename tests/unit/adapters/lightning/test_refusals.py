"""What is refused of Lightning, and how many steps a fit has left."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from tests.unit.worker.alone import alone, has_trained

from craft.adapters.lightning import refusals
from craft.adapters.lightning.strategy import _steps_left
from craft.protocol.errors import ConfigError


class Keeps(L.Callback):
    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = 1


def trainer_with(*given: L.Callback) -> L.Trainer:
    return L.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, callbacks=list(given))


@pytest.mark.parametrize("callback", [callbacks.StochasticWeightAveraging(swa_lrs=0.1), callbacks.EMAWeightAveraging()])
def test_callbacks_whose_state_nobody_would_have_are_refused_by_name(callback: L.Callback) -> None:
    with pytest.raises(ConfigError, match=f"{type(callback).__name__} has a state that is not in the module"):
        refusals.check(trainer_with(callback), torch.device("cpu"))


@pytest.mark.parametrize("callback", [callbacks.LearningRateFinder(), callbacks.BatchSizeFinder()])
def test_callbacks_that_train_before_the_fit_are_refused_by_name(callback: L.Callback) -> None:
    """They left a job that had ended after their own few steps, and a file that one worker had removed before another read it."""
    with pytest.raises(ConfigError, match=f"{type(callback).__name__} .* find the value in a script of its own"):
        refusals.check_only_fit(trainer_with(callback), alone())


def test_a_second_fit_is_refused_in_words_of_lightnings() -> None:
    with pytest.raises(ConfigError, match=r"a second trainer\.fit\(\) in one script"):
        refusals.check_only_fit(trainer_with(), has_trained())
    refusals.check_only_fit(trainer_with(), alone())


def test_what_code_of_the_scripts_own_keeps_in_checkpoints_is_told(caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_with(Keeps(), callbacks.ModelCheckpoint(dirpath="nowhere"))
    trainer.strategy._lightning_module = L.LightningModule()
    with caplog.at_level(logging.WARNING):
        refusals.warn_of_what_stays(trainer)
    (told,) = [record.getMessage() for record in caplog.records if record.name == refusals.__name__]
    assert told.startswith("Keeps.on_save_checkpoint is for Lightning's own checkpoints")


@pytest.mark.parametrize(
    ("ready", "processed", "batches", "left"),
    [(0, 0, 0, 24), (1, 0, 2, 22), pytest.param(2, 2, 6, 12, id="from the end of an epoch")],
)
def test_a_fit_goes_on_to_its_last_epoch_wherever_it_goes_on_from(
    ready: int, processed: int, batches: int, left: int
) -> None:
    epochs = SimpleNamespace(current=SimpleNamespace(ready=ready, processed=processed))
    progress = SimpleNamespace(current=SimpleNamespace(completed=batches))
    fit = SimpleNamespace(max_epochs=4, epoch_progress=epochs, epoch_loop=SimpleNamespace(batch_progress=progress))
    trainer = SimpleNamespace(fit_loop=fit, num_training_batches=6, max_steps=-1, global_step=0)
    assert _steps_left(trainer) == left
