"""Base classes of a fit: what ``CraftStrategy`` asks of it, and what all fits of a job share.

``Fit`` is Lightning's loop without a job. ``microbatches.py`` and ``whole.py`` have the two that make a job's steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from craft.adapters.lightning import leader_output, refusals
from craft.adapters.lightning.metric_log import MetricRecorder
from craft.adapters.lightning.process_info import ProcessInfo
from craft.adapters.lightning.progress import FitCallbackStates, FitProgress
from craft.worker.api.steps import Driven, Steps

Native = Callable[..., Any]


class Fit:
    """Lightning's loop. The strategy's hook of the same name calls each method."""

    def __init__(self, strategy: ProcessInfo, trainer: Any) -> None:
        self.strategy = strategy
        self.trainer = trainer
        self.undo = ExitStack()
        """Restores what the fit has replaced."""

    def process_dataloader(self, dataloader: Any) -> Any:
        return dataloader

    def on_train_start(self) -> None:
        pass

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass

    def training_step(self, native: Native, *args: Any, **kwargs: Any) -> Any:
        return native(*args, **kwargs)

    def optimizer_step(
        self, native: Native, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        return native(optimizer, closure, *args, **kwargs)

    def on_train_end(self) -> None:
        pass

    def close(self) -> None:
        """The fit is over, perhaps by an error."""
        self.undo.close()

    def __deepcopy__(self, memo: Any) -> Fit:
        """Leave a copy of the trainer without the fit."""
        return self

    def replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Replace a method of ``owner`` by ``function`` until the fit is over."""
        setattr(owner, name, function)
        self.undo.callback(vars(owner).pop, name, None)


class FollowingFit(Fit):
    """A fit whose state follows the job."""

    def __init__(self, strategy: ProcessInfo, trainer: Any) -> None:
        super().__init__(strategy, trainer)
        self.recorder = MetricRecorder(strategy.reduce)
        self.progress = FitProgress(trainer)
        self.surroundings = FitCallbackStates(trainer, self.recorder)

    @property
    def driven(self) -> Driven | None:
        return self.strategy._driven

    def begin(self, make_steps: Callable[[], Steps], **registered: Any) -> Driven:
        """Join the others once everything is set up, and take their state if they train already."""
        strategy, job = self.strategy, self.strategy._job
        refusals.warn_of_what_stays(self.trainer)
        job.replicate(strategy.model)  # type: ignore[type-var]
        job.register(**self._registered(), **registered)
        driven = strategy._driven = Driven(make_steps())
        driven.next()
        strategy._take_rank()
        return driven

    def _registered(self) -> dict[str, Any]:
        strategy = self.strategy
        items: dict[str, Any] = {f"optimizer{index}": each for index, each in enumerate(strategy.optimizers)}
        items |= {f"scheduler{index}": each.scheduler for index, each in enumerate(strategy.lr_scheduler_configs)}
        if (scaler := getattr(strategy.precision_plugin, "scaler", None)) is not None:
            items["scaler"] = scaler
        averaging = [each for each in self.trainer.callbacks if refusals.is_a(each, "WeightAveraging")]
        models = {f"averaged{index}": each._average_model for index, each in enumerate(averaging)}
        items |= {name: model for name, model in models.items() if model is not None}
        return items | {"trainer": self.progress, "surroundings": self.surroundings}

    def follow_leader(self) -> None:
        """After each commit, before anything is written: let the current rank 0 write."""
        strategy = self.strategy
        strategy._take_rank()
        if self.surroundings.places is None:
            self.surroundings.places = strategy.broadcast(leader_output.places(self.trainer))
            leader_output.adopt(self.trainer, self.surroundings.places)
        if strategy.is_global_zero and not strategy._leads:
            strategy._leads = True
            leader_output.take_over(self.trainer)

    def stop(self) -> None:
        """Stop the trainer because the job was told to stop, despite its minimum of steps."""
        self.trainer.should_stop = True
        self.trainer.fit_loop.min_epochs = self.trainer.fit_loop.epoch_loop.min_steps = None


class HeldGradients:
    """Gradients that a step leaves for the next one, as part of the training state."""

    beside_the_state = True

    def __init__(self, module: torch.nn.Module | None) -> None:
        assert module is not None
        self._module = module

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: param.grad for name, param in self._module.named_parameters() if param.grad is not None}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, param in self._module.named_parameters():
            param.grad = state[name].clone() if name in state else None
