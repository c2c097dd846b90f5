"""``Trainer(strategy="craft")``: Lightning's fit loop over the steps of a job.

How a fit runs is chosen when its data is known (``choice.py``); the hooks of this class delegate to that.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

import torch

from craft.adapters.lightning import refusals
from craft.adapters.lightning.fit.choice import choose, lightnings_own
from craft.adapters.lightning.fit.fit import Fit
from craft.adapters.lightning.process_info import ProcessInfo
from craft.adapters.requirements import check_version
from craft.worker.api.adapter_access import has_trained, is_alone
from craft.worker.api.job import Job
from craft.worker.api.steps import Step
from craft.worker.entry.join import join_anew

_fitted: WeakSet[Job] = WeakSet()
"""Jobs in which a fit was begun: outside of ``craft run`` the next fit is another job."""


class CraftStrategy(ProcessInfo):
    """Each process that ``craft run`` started is a worker of one job; losses, joins and drains do not change a bit."""

    strategy_name = "craft"

    def __init__(self, microbatches: int | None = None, **more: Any) -> None:
        """``microbatches``: batches of the DataLoader in a step; default: the job's slots times accumulate_grad_batches."""
        super().__init__(**more)
        check_version(self.package, importlib.import_module(self.package).__version__)
        self._microbatches = microbatches
        self._fit: Fit | None = None
        self._evaluating = ExitStack()
        self._undo = ExitStack()
        # Before the script makes loggers: a replacement of rank 0 must not take itself for rank 0.
        self._take_rank()
        self._leads = self.is_global_zero

    # Before the first step.

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def setup(self, trainer: Any) -> None:
        alone = is_alone(self._job)
        refusals.check(trainer, self.root_device, alone)
        if not alone:
            # Agents handle signals; Lightning's handler would talk to other workers at any moment, as would its question to
            # rank 0 before each step.
            trainer._signal_connector.register_signal_handlers = _nothing
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing
        if trainer.state.fn == "fit":
            self._take_job(trainer, alone)
            self._fit = lightnings_own(self, trainer)
            self._await_data(trainer)
        super().setup(trainer)

    def _take_job(self, trainer: Any, alone: bool) -> None:
        """Make each fit outside of ``craft run`` a job of one."""
        if alone and (has_trained(self._job) or self._job in _fitted):
            self._joined = join_anew()
        refusals.check_only_fit(trainer, self._job)
        _fitted.add(self._job)
        if self._job.rank < 0:
            # The others have made this check, and wait for no worker.
            trainer.num_sanity_val_steps = 0

    def _await_data(self, trainer: Any) -> None:
        """Choose how the fit runs as soon as the script has given its training data, before Lightning uses it."""
        source = trainer.fit_loop._data_source
        get = source.dataloader

        def choose_by_data() -> Any:
            loaders = get()
            if self._fit is None:
                self._fit = choose(self, trainer, loaders, self._microbatches)
            return loaders

        source.dataloader = choose_by_data
        self._undo.callback(vars(source).pop, "dataloader", None)

    def process_dataloader(self, dataloader: object) -> object:
        trainer: Any = self.lightning_module.trainer  # type: ignore[union-attr]
        return self._fit.process_dataloader(dataloader) if trainer.training and self._fit is not None else dataloader

    def on_train_start(self) -> None:
        if self._fit is not None:
            self._fit.on_train_start()

    # A step.

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        return batch if isinstance(batch, Step) else super().batch_to_device(batch, device, dataloader_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._fit is not None:
            self._fit.on_train_batch_start(batch, batch_idx)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        native = super().optimizer_step
        if self._fit is None:
            return native(optimizer, closure, model, **kwargs)
        return self._fit.optimizer_step(native, optimizer, closure, model, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        native = super().training_step
        return native(*args, **kwargs) if self._fit is None else self._fit.training_step(native, *args, **kwargs)

    # Around validation, and at the end.

    def on_validation_start(self) -> None:
        self._evaluating.enter_context(self._job.paused("validation"))

    def on_validation_end(self) -> None:
        self._evaluating.close()

    def on_train_end(self) -> None:
        if self._fit is not None:
            self._fit.on_train_end()
        if self._driven is not None:
            self._driven.finish()

    def teardown(self) -> None:
        """Undo everything of the fit, also after an error."""
        self._evaluating.close()
        self._undo.close()
        if self._fit is not None:
            self._fit.close()
            self._fit = None
        if self._driven is not None:
            self._driven.close()
            self._driven, self._accumulates = None, False
        super().teardown()

    def __reduce__(self) -> Any:
        """Leave a copy of a trainer without the job."""
        return _make, (self.package,), super().__getstate__() | dict.fromkeys(("_joined", "_fit", "_driven"))


@functools.cache
def strategy_class(package: str) -> Any:
    """Return the strategy as a subclass of this package's ``Strategy``."""
    base = importlib.import_module(f"{package}.strategies").Strategy
    own = {"__doc__": CraftStrategy.__doc__, "__module__": __name__, "package": package}
    return type("CraftStrategy", (CraftStrategy, base), own)


def _make(package: str) -> CraftStrategy:
    """Return an empty strategy of this package; pickle cannot name its class, which is made at run time."""
    kind = strategy_class(package)
    made: CraftStrategy = kind.__new__(kind)
    return made


def _nothing() -> None:
    """Replaces an unwanted function."""
