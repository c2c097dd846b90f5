"""Callbacks of Lightning's that train, too: which are known here, and what of them is a part of the training state."""

from __future__ import annotations

from typing import Any

FINDERS = ("LearningRateFinder", "BatchSizeFinder")
"""They train before the fit."""
UNFOLLOWED = ("StochasticWeightAveraging", "ModelPruning")
"""They build parts of the model, or of its optimizers, on the way."""


def is_a(callback: Any, *names: str) -> bool:
    """Whether ``callback`` is of a class of Lightning's with one of these names, in either of its packages."""
    return any(kind.__name__ in names for kind in type(callback).__mro__)


def averages_of(trainer: Any) -> dict[str, Any]:
    """What is to be registered of ``WeightAveraging`` callbacks: the model that each of them keeps."""
    kept = [each._average_model for each in trainer.callbacks if is_a(each, "WeightAveraging")]
    return {f"averaged{index}": model for index, model in enumerate(kept) if model is not None}
