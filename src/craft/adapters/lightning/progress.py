"""The trainer's progress as part of the training state, for joining workers and resumed jobs.

``FitProgress`` has Lightning's counters; ``FitCallbackStates`` the rest: states of callbacks, and logged values.
"""

from __future__ import annotations

from typing import Any

import torch

from craft.adapters.callback_state import CallbackState
from craft.adapters.lightning import leader_output, metric_log

_UNSAID = ("_last_checkpoint_saved", "_last_global_step_saved", "_latest_update_epoch")
"""Attributes that ``ModelCheckpoint`` and ``WeightAveraging`` use and omit from their states."""


class FitProgress:
    """The fit loop's counters at a step boundary. While a step is computed, those of the previous boundary."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.loaded = False
        """Whether a state was loaded, so that the fit loop continues from there."""
        self.runs = False
        """Whether the fit loop runs, so that an epoch has begun, whatever a later state says."""
        self.rounds = 0
        """Lightning's batches in the step in flight: they belong to no boundary."""
        self.reloaded = 0
        """The epoch in which the loaders of the loaded state were made."""

    def _counters(self) -> dict[str, Any]:
        fit = self._trainer.fit_loop
        epoch = fit.epoch_loop
        return {
            "epochs": fit.epoch_progress,
            "batches": epoch.batch_progress,
            "schedulers": epoch.scheduler_progress,
            "steps": epoch.automatic_optimization.optim_progress.optimizer.step,
            "manual_steps": epoch.manual_optimization.optim_step_progress,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return completed counts: ready, started and processed ones depend on the moment of the call."""
        state: dict[str, Any] = {
            name: [counter.total.completed, counter.current.completed] for name, counter in self._counters().items()
        }
        state["batches"] = [completed - self.rounds for completed in state["batches"]]
        fit = self._trainer.fit_loop
        state["logged_steps"] = fit.epoch_loop._batches_that_stepped
        state["reloaded"] = max(fit._last_train_dl_reload_epoch, 0)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        fit = self._trainer.fit_loop
        epoch = fit.epoch_loop
        for name, counter in self._counters().items():
            _set(counter, state[name])
        epoch.batch_progress.is_last_batch = False
        _set(epoch.automatic_optimization.optim_progress.optimizer.zero_grad, state["steps"])
        epoch._batches_that_stepped = state["logged_steps"]
        self.reloaded = state["reloaded"]
        if self._in_epoch or self.runs:
            # It was begun, and is not over.
            for tracker in (fit.epoch_progress.total, fit.epoch_progress.current):
                tracker.ready += 1
                tracker.started += 1
        if fit._data_fetcher is not None:
            fit._data_fetcher.fetched = epoch.batch_progress.current.ready
        self.loaded = True

    @property
    def _in_epoch(self) -> bool:
        return bool(self._trainer.fit_loop.epoch_loop.batch_progress.current.completed)

    def resume(self) -> None:
        """Make the fit loop, which is about to begin, continue where the state says, perhaps in the middle of an epoch."""
        fit = self._trainer.fit_loop
        fit._data_fetcher.fetched = 0
        if self._in_epoch:
            fit.restarting = True
            _go_on(fit)
        else:
            _begin(fit)
        fit.reset()


def _set(counter: Any, state: list[int]) -> None:
    for tracker, completed in zip((counter.total, counter.current), state, strict=True):
        for name in ("ready", "started", "processed", "completed"):
            if hasattr(tracker, name):
                setattr(tracker, name, completed)


def _begin(fit: Any) -> None:
    """Begin an epoch: what a Lightning checkpoint (``ckpt_path``) was in the middle of is over."""
    for loop in (fit, fit.epoch_loop, fit.epoch_loop.val_loop):
        loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False


def _go_on(fit: Any) -> None:
    """Resume at a boundary: Lightning resumes inside of a step, where a checkpoint was saved."""
    epoch = fit.epoch_loop
    on_run_start = epoch.on_run_start

    def begin(data_fetcher: Any) -> None:
        del epoch.on_run_start
        on_run_start(data_fetcher)
        # Once the counters are kept: other things that a restarting loop skips would be skipped here alone.
        fit._restarting = epoch._restarting = False
        epoch.val_loop.restarting = False

    epoch.on_run_start = begin


class FitCallbackStates:
    """States of callbacks and logged values: they travel with the state, but need not have the same bits."""

    beside_the_state = True

    def __init__(self, trainer: Any, recorder: metric_log.MetricRecorder) -> None:
        self._trainer = trainer
        self._recorder = recorder
        self.places: leader_output.Places | None = None
        """Where rank 0 writes; None until the first step of the job agrees on it."""
        self._loaded: dict[str, Any] | None = None
        self._travel = CallbackState()

    def moved_on(self) -> None:
        """A step is over: the loaded state is outdated."""
        self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        if self._loaded is not None:
            return self._loaded
        connector = self._trainer._logger_connector
        return {
            "places": self.places,
            "callbacks": self._callbacks(),
            "metrics": {name: float(value) for name, value in connector._callback_metrics.items()},
            "logged": metric_log.save(self._trainer.fit_loop.epoch_loop._results, self._recorder),
        }

    def _callbacks(self) -> dict[str, Any]:
        found = {}
        for callback in self._trainer.callbacks:
            # By these ModelCheckpoint decides on each worker whether all are to save.
            state = callback.state_dict() | {name: vars(callback)[name] for name in _UNSAID if name in vars(callback)}
            if state and self._travel.allows(callback.state_key, state):
                found[callback.state_key] = state
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        self.places = state["places"]
        if self.places is not None:
            leader_output.adopt(trainer, self.places)
        for callback in trainer.callbacks:
            if callback.state_key in state["callbacks"]:
                restore(callback, state["callbacks"][callback.state_key])
        connector = trainer._logger_connector
        connector._callback_metrics.update({name: torch.tensor(value) for name, value in state["metrics"].items()})
        metric_log.load(trainer.fit_loop.epoch_loop._results, self._recorder, state["logged"])
        # The first batch here is not the first of the epoch, at which values are reset.
        connector._first_loop_iter = True
        self._loaded = state


def restore(callback: Any, state: dict[str, Any]) -> None:
    """Load a callback's state completely: some skip what they save, and would send the next worker another state."""
    callback.load_state_dict(state)
    own = callback.state_dict()
    for name, value in state.items():
        # A saved form, such as an enumeration's value, is not what the attribute holds.
        if name in vars(callback) and own.get(name, vars(callback)[name]) is vars(callback)[name]:
            setattr(callback, name, value)
