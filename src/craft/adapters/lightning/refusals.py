"""What a script may ask of Lightning that cannot work under CRAFT: refused before the first step, with a sentence."""

from __future__ import annotations

import logging
from typing import Any

import torch

from craft.adapters.lightning.loader import StepLoader
from craft.protocol.errors import ConfigError
from craft.worker.job import Job, has_trained

logger = logging.getLogger(__name__)


def check(trainer: Any, device: torch.device) -> None:
    """Before the model is set up."""
    accelerator = type(trainer.accelerator).__name__
    if device.type == "cpu" and accelerator != "CPUAccelerator":
        raise ConfigError(
            f'Trainer(strategy="craft") runs on the CPU and on GPUs of NVIDIA, and this one has a {accelerator}:'
            ' accelerator="cpu" or "gpu"'
        )
    if trainer._accelerator_connector._layer_sync is not None:
        raise ConfigError(
            "Trainer(sync_batchnorm=True) exchanges statistics inside the forward pass and so would make a microbatch depend"
            " on who computes the others: leave it out"
        )
    for callback in trainer.callbacks:
        if _is_a(callback, "StochasticWeightAveraging", "WeightAveraging", "ModelPruning"):
            raise ConfigError(
                f"{type(callback).__name__} has a state that is not in the module: a worker that joins, or a job that goes on,"
                ' would begin without it. Not under strategy="craft"; a moving average can be kept in buffers of the module'
            )
    if any(type(each).__name__ == "GradientAccumulationScheduler" for each in trainer.callbacks):
        raise ConfigError(
            "GradientAccumulationScheduler changes the size of a step on the way, and a job's microbatches never change:"
            " use Trainer(accumulate_grad_batches=...)"
        )


def check_only_fit(trainer: Any, job: Job) -> None:
    """Before the model is set up for a fit."""
    if has_trained(job):
        raise ConfigError(
            "a second trainer.fit() in one script: a job has one, and its order of data goes on through all of it. Give the first"
            " more epochs, or run a script for each with craft run"
        )
    for callback in trainer.callbacks:
        if _is_a(callback, "LearningRateFinder", "BatchSizeFinder"):
            # Those of a Tuner are of these classes, too.
            raise ConfigError(
                f"{type(callback).__name__} (by itself, or Tuner's) trains before the fit, and a job trains once: find the value"
                ' in a script of its own, without strategy="craft", and set it here'
            )


def check_fit(trainer: Any, loader: StepLoader | None) -> None:
    """When Lightning has all that it trains with."""
    if not trainer.lightning_module.automatic_optimization:
        raise ConfigError(
            'manual optimization is not there yet under strategy="craft": set automatic_optimization = True, or write the'
            " loop with craft.join()"
        )
    if any(isinstance(each, torch.optim.LBFGS) for each in trainer.optimizers):
        raise ConfigError('LBFGS computes a step several times over: strategy="craft" does that once')
    if loader is None or trainer.train_dataloader is not loader:
        raise ConfigError('Trainer(strategy="craft") takes one DataLoader for training, not a collection of them')
    if type(trainer.fit_loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher":
        raise ConfigError('training_step(dataloader_iter) is not there under strategy="craft": take a batch')
    if trainer.reload_dataloaders_every_n_epochs:
        raise ConfigError(
            "Trainer(reload_dataloaders_every_n_epochs=...) changes the data on the way, and a job's order of data is fixed at"
            " its first step: leave it out"
        )


def warn_of_what_stays(trainer: Any) -> None:
    """Say what is saved by code of the script's own, which nobody asks for a worker that joins."""
    for each in (trainer.lightning_module, *trainer.callbacks):
        base = next(kind for kind in type(each).__mro__ if kind.__name__ in ("LightningModule", "Callback"))
        for name in ("on_save_checkpoint", "on_load_checkpoint"):
            if getattr(type(each), name) is not getattr(base, name):
                logger.warning(
                    "%s.%s is for Lightning's own checkpoints: what it keeps comes neither to a worker that joins nor into"
                    " those of CRAFT. Keep it in buffers, or in state_dict() of the callback", type(each).__name__, name,
                )  # fmt: skip
                break


def _is_a(callback: Any, *names: str) -> bool:
    return any(kind.__name__ in names for kind in type(callback).__mro__)
