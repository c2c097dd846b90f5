"""Refuse, before the first step, what Lightning cannot do under CRAFT."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch

from craft.protocol.errors import ConfigError
from craft.worker.api.adapter_access import has_trained
from craft.worker.api.job import Job

logger = logging.getLogger(__name__)

FINDERS = ("LearningRateFinder", "BatchSizeFinder")
"""Callbacks that train before the fit."""
UNFOLLOWED = ("StochasticWeightAveraging", "ModelPruning")
"""Callbacks that build parts of the model, or of its optimizers, during the fit."""


def is_a(callback: Any, *names: str) -> bool:
    """Return whether ``callback`` is of a Lightning class with one of these names, in either package."""
    return any(kind.__name__ in names for kind in type(callback).__mro__)


def check(trainer: Any, device: torch.device, alone: bool) -> None:
    """Check before the model is set up. ``alone``: a job of one outside of ``craft run``, without other workers."""
    accelerator = type(trainer.accelerator).__name__
    if device.type == "cpu" and accelerator != "CPUAccelerator":
        raise ConfigError(
            f'Trainer(strategy="craft") runs on the CPU and on GPUs of NVIDIA, and this one has a {accelerator}:'
            ' accelerator="cpu" or "gpu"'
        )
    if alone:
        return
    if trainer._accelerator_connector._layer_sync is not None:
        raise ConfigError(
            "Trainer(sync_batchnorm=True) exchanges statistics inside the forward pass and so would make a microbatch depend"
            " on who computes the others: leave it out"
        )
    if "dataloader_iter" in inspect.signature(trainer.lightning_module.training_step).parameters:
        raise ConfigError(
            "training_step(dataloader_iter) reads as many batches as it likes, so that a worker that joins in the middle of an"
            " epoch cannot tell where it is: under craft run take a batch"
        )
    for callback in trainer.callbacks:
        _check_callback(callback)


def _check_callback(callback: Any) -> None:
    """Raise ConfigError for a callback that only a job of one can have."""
    name = type(callback).__name__
    if is_a(callback, *UNFOLLOWED):
        raise ConfigError(
            f"{name} builds parts of the model, or of its optimizers, on the way: a worker that joins, or a job that goes on,"
            " could not. Not under craft run; a moving average can be kept by WeightAveraging"
        )
    if is_a(callback, "GradientAccumulationScheduler"):
        raise ConfigError(
            "GradientAccumulationScheduler changes the size of a step on the way, and a job's microbatches never change:"
            " use Trainer(accumulate_grad_batches=...)"
        )
    if is_a(callback, *FINDERS):
        # A Tuner's callbacks are of these classes, too.
        raise ConfigError(
            f"{name} (by itself, or Tuner's) trains before the fit, and a job trains once: find the value in a separate script,"
            " without craft run, and set it here"
        )


def check_only_fit(trainer: Any, job: Job) -> None:
    """Check before the model is set up for a fit."""
    if has_trained(job):
        raise ConfigError(
            "a second trainer.fit() in one script: a job has one, and its order of data goes on through all of it. Give the first"
            " more epochs, or run a script for each with craft run"
        )


def warn_of_what_stays(trainer: Any) -> None:
    """Warn about hooks of the script that save state which joining workers do not get."""
    for each in (trainer.lightning_module, *trainer.callbacks):
        if is_a(each, "WeightAveraging"):
            continue
        base = next((kind for kind in type(each).__mro__ if kind.__name__ in ("LightningModule", "Callback")), None)
        for name in ("on_save_checkpoint", "on_load_checkpoint"):
            if base is not None and getattr(type(each), name) is not getattr(base, name):
                logger.warning(
                    "%s.%s is for Lightning's own checkpoints: what it keeps comes neither to a worker that joins nor into"
                    " those of CRAFT. Keep it in buffers, or in state_dict() of the callback", type(each).__name__, name,
                )  # fmt: skip
                break
