"""Where a trainer is, handed from worker to worker."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from craft.adapters.lightning.progress import restore


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
