"""Choose how a fit runs: divided into microbatches, as a whole on every worker, or, in a job of one, by Lightning alone."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from craft.adapters.lightning.fit.fit import Fit
from craft.adapters.lightning.fit.microbatches import MicrobatchFit
from craft.adapters.lightning.fit.whole import WholeFit
from craft.adapters.lightning.refusals import FINDERS, UNFOLLOWED, is_a

logger = logging.getLogger(__name__)


def choose(strategy: Any, trainer: Any, loaders: Any, microbatches: int | None) -> Fit:
    """Choose, before the ``loaders`` of the script are used."""
    if (why := _why_whole(trainer, loaders)) is None:
        return MicrobatchFit(strategy, trainer, microbatches)
    whole = WholeFit(strategy, trainer, why)
    whole.seed_epoch()
    return whole


def lightnings_own(strategy: Any, trainer: Any) -> Fit | None:
    """Return a fit without a job, for callbacks that no other worker could follow; in a job of one only.

    Call it before any callback runs: some replace all others for a while.
    """
    for callback in trainer.callbacks:
        if is_a(callback, *FINDERS, *UNFOLLOWED, "GradientAccumulationScheduler"):
            logger.warning(
                "%s: no other worker could follow this fit, so it is Lightning's own, outside of any job",
                type(callback).__name__,
            )
            return Fit(strategy, trainer)
    return None


def _why_whole(trainer: Any, loaders: Any) -> str | None:
    """Return why a step of this fit cannot be divided into microbatches; None if it can."""
    module = trainer.lightning_module
    if not module.automatic_optimization:
        return "manual optimization"
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        return "training_step(dataloader_iter)"
    if any(isinstance(each, torch.optim.LBFGS) for each in trainer.optimizers):
        return "LBFGS"
    if trainer.reload_dataloaders_every_n_epochs:
        return "reload_dataloaders_every_n_epochs"
    if not isinstance(loaders, DataLoader):
        return f"data from a {type(loaders).__qualname__}"
    return _why_not_taken_over(loaders)


def _why_not_taken_over(loader: DataLoader[Any]) -> str | None:
    """Return why the batches of this loader cannot be read by number; None if they can."""
    kind = type(loader)
    if any(getattr(kind, name) is not getattr(DataLoader, name) for name in ("__iter__", "_get_iterator")):
        return f"{kind.__qualname__}, which makes its own batches"
    if isinstance(loader.dataset, IterableDataset):
        return "an IterableDataset"
    if type(loader.batch_sampler) is not BatchSampler:
        return f"batches from a {type(loader.batch_sampler).__qualname__}"
    for sized in (loader.dataset, loader.batch_sampler.sampler):
        if not hasattr(sized, "__len__"):
            return f"a {type(sized).__qualname__} without a length"
    return None
