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
from craft.adapters.lightning.fit.microbatches import most_steps
from craft.protocol.errors import ConfigError


class Keeps(L.Callback):
    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = 1


class ByIterator(L.LightningModule):
    def training_step(self, dataloader_iter: Any) -> None:
        pass


def trainer_with(*given: L.Callback, module: L.LightningModule | None = None) -> L.Trainer:
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, callbacks=list(given))
    trainer.strategy._lightning_module = module or L.LightningModule()
    return trainer


def test_a_training_step_that_reads_by_itself_is_refused_where_others_may_join() -> None:
    with pytest.raises(ConfigError, match="cannot tell where it is"):
        refusals.check(trainer_with(module=ByIterator()), torch.device("cpu"), alone=False)
    refusals.check(trainer_with(module=ByIterator()), torch.device("cpu"), alone=True)


@pytest.mark.parametrize(
    "callback", [callbacks.StochasticWeightAveraging(swa_lrs=0.1), callbacks.ModelPruning("l1_unstructured")]
)
def test_callbacks_that_no_other_worker_could_follow_are_refused_by_name(callback: L.Callback) -> None:
    with pytest.raises(ConfigError, match=f"{type(callback).__name__} builds parts of the model"):
        refusals.check(trainer_with(callback), torch.device("cpu"), alone=False)
    refusals.check(trainer_with(callback), torch.device("cpu"), alone=True)


@pytest.mark.parametrize("callback", [callbacks.LearningRateFinder(), callbacks.BatchSizeFinder()])
def test_callbacks_that_train_before_the_fit_are_refused_by_name(callback: L.Callback) -> None:
    """They left a job that had ended after their own few steps, and a file that one worker had removed before another read it."""
    with pytest.raises(ConfigError, match=f"{type(callback).__name__} .* find the value in a separate script"):
        refusals.check(trainer_with(callback), torch.device("cpu"), alone=False)


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


@pytest.mark.parametrize(("max_epochs", "max_steps", "most"), [(4, -1, 24), (4, 10, 10), (None, 10, 10)])
@pytest.mark.parametrize("done", [0, 2])
def test_how_long_a_job_is_does_not_depend_on_the_checkpoint_that_a_worker_finds(
    max_epochs: int | None, max_steps: int, most: int, done: int
) -> None:
    """One that joins may find a newer one, as with ``ckpt_path="last"``: it would be refused for another number of steps."""
    epochs = SimpleNamespace(current=SimpleNamespace(ready=done, processed=done))
    progress = SimpleNamespace(current=SimpleNamespace(completed=done))
    fit = SimpleNamespace(
        max_epochs=max_epochs, epoch_progress=epochs, epoch_loop=SimpleNamespace(batch_progress=progress)
    )
    trainer = SimpleNamespace(
        fit_loop=fit, num_training_batches=6, max_steps=max_steps, global_step=6 * done, accumulate_grad_batches=1
    )
    assert most_steps(trainer) == most
