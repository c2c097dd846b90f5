"""Where a trainer is, handed from worker to worker."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from craft.adapters.lightning.progress import FitProgress, restore


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_callback_hands_on_the_state_that_it_was_given(package: str) -> None:
    callbacks: Any = importlib.import_module(f"{package}.callbacks")
    given = callbacks.ModelCheckpoint(dirpath="/nowhere", monitor="val_loss", save_top_k=2)
    # Saved by Lightning, and not loaded.
    given.current_score, given.best_model_score = torch.tensor(0.5), torch.tensor(0.25)
    given.best_k_models = {"a": torch.tensor(0.25)}
    taken = callbacks.ModelCheckpoint(dirpath="/nowhere", monitor="val_loss", save_top_k=2)
    restore(taken, given.state_dict())
    assert taken.state_dict() == given.state_dict()


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_callback_that_saves_an_attribute_in_another_form_can_be_asked_for_its_state_again(package: str) -> None:
    callbacks: Any = importlib.import_module(f"{package}.callbacks")
    given, taken = (callbacks.EarlyStopping("val_loss") for _ in range(2))
    given.wait_count = 2

    restore(taken, given.state_dict())

    assert taken.state_dict() == given.state_dict()


def trainer_of(package: str) -> Any:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = importlib.import_module(package).Trainer(accelerator="cpu", max_epochs=3, **quiet)
    trainer.strategy.model = torch.nn.Linear(1, 1)
    trainer.fit_loop.max_batches = 4
    trainer.fit_loop._data_fetcher = SimpleNamespace(fetched=0)
    trainer.fit_loop._combined_loader = SimpleNamespace(flattened=[], _state_dicts=list)
    return trainer


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_worker_that_joins_between_epochs_is_no_longer_inside_the_checkpoint_that_the_fit_began_from(
    package: str,
) -> None:
    saved = trainer_of(package).fit_loop
    saved.epoch_progress.increment_ready()
    saved.epoch_progress.increment_started()
    # In the end of its second batch, where callbacks save.
    batches = saved.epoch_loop.batch_progress
    for count in (batches.increment_ready, batches.increment_started, batches.increment_processed):
        count(), count()
    batches.increment_completed()
    trainer = trainer_of(package)
    trainer.fit_loop.load_state_dict(saved.state_dict())
    trainer.fit_loop.reset()
    state: dict[str, Any] = {
        "epochs": [1, 1],
        "batches": [4, 0],
        "schedulers": [4, 0],
        "steps": [4, 0],
        "manual_steps": [0, 0],
    }
    state |= {"logged_steps": 4, "reloaded": 0}

    progress = FitProgress(trainer)
    progress.load_state_dict(state)
    progress.resume()
    trainer.fit_loop.epoch_loop.reset()

    assert progress.state_dict() == state
    assert not trainer.fit_loop.restarting and not trainer.fit_loop.restarted_mid_epoch
