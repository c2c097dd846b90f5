"""Lightning's callbacks that train, too: which are known, and what of them is part of the training state."""

from __future__ import annotations

from typing import Any

FINDERS = ("LearningRateFinder", "BatchSizeFinder")
"""They train before the fit."""
UNFOLLOWED = ("StochasticWeightAveraging", "ModelPruning")
"""They build parts of the model, or of its optimizers, during the fit."""


def is_a(callback: Any, *names: str) -> bool:
    """Return whether ``callback`` is of a Lightning class with one of these names, in either package."""
    return any(kind.__name__ in names for kind in type(callback).__mro__)


def averages_of(trainer: Any) -> dict[str, Any]:
    """Return what to register of ``WeightAveraging`` callbacks: the averaged model of each."""
    kept = [each._average_model for each in trainer.callbacks if is_a(each, "WeightAveraging")]
    return {f"averaged{index}": model for index, model in enumerate(kept) if model is not None}
