"""Where the trainer is, as a part of the training state: so that a worker that joins, or a job that resumes, is there, too.

``FitProgress`` has Lightning's counters; ``FitCallbackStates`` what else a trainer holds: the states of callbacks, and what was logged.
"""

from __future__ import annotations

from typing import Any

import torch

from craft.adapters.callback_state import CallbackState
from craft.adapters.lightning import leader_output, metric_log

_UNSAID = ("_last_checkpoint_saved", "_last_global_step_saved", "_latest_update_epoch")
"""What ``ModelCheckpoint`` and ``WeightAveraging`` go by and leave out of their states."""


class FitProgress:
    """The fit loop's counters at a step boundary. While a step is computed, those of the boundary before it."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.loaded = False
        """Whether a state was loaded: the fit loop is to go on from there."""
        self.runs = False
        """Whether the fit loop is on its way, so that an epoch has begun, whatever a state says that is loaded from now on."""
        self.rounds = 0
        """Batches of Lightning's that the step in flight has had so far: they belong to no boundary."""
        self.reloaded = 0
        """The epoch in which the loaders were made, of the state that was loaded."""

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
        """What is completed: what is ready, started or processed beside it depends on when this is called."""
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
            for tracker, completed in zip((counter.total, counter.current), state[name], strict=True):
                _set(tracker, completed)
        epoch.batch_progress.is_last_batch = False
        zero_grad = epoch.automatic_optimization.optim_progress.optimizer.zero_grad
        for tracker, completed in zip((zero_grad.total, zero_grad.current), state["steps"], strict=True):
            _set(tracker, completed)
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
        """Have the fit loop, which is about to begin, go on where the state says; in the middle of an epoch, if it is there."""
        fit = self._trainer.fit_loop
        fit._data_fetcher.fetched = 0
        if self._in_epoch:
            fit.restarting = True
            _go_on(fit)
        else:
            _begin(fit)
        fit.reset()


def _set(tracker: Any, completed: int) -> None:
    for name in ("ready", "started", "processed", "completed"):
        if hasattr(tracker, name):
            setattr(tracker, name, completed)


def _begin(fit: Any) -> None:
    """An epoch is to begin: what a checkpoint of Lightning's own (``ckpt_path``) was in the middle of is over."""
    for loop in (fit, fit.epoch_loop, fit.epoch_loop.val_loop):
        loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False


def _go_on(fit: Any) -> None:
    """Lightning resumes where a checkpoint was saved, inside of a step; this state is that of a boundary: nothing is due."""
    epoch = fit.epoch_loop
    on_run_start = epoch.on_run_start

    def begin(data_fetcher: Any) -> None:
        del epoch.on_run_start
        on_run_start(data_fetcher)
        # Once the counters are kept: what else a loop leaves out while it restarts would be left out here alone.
        fit._restarting = epoch._restarting = False
        epoch.val_loop.restarting = False

    epoch.on_run_start = begin


class FitCallbackStates:
    """States of callbacks and logged values: they travel with the state, and are no part of what must be the same bits."""

    beside_the_state = True

    def __init__(self, trainer: Any, recorder: metric_log.MetricRecorder) -> None:
        self._trainer = trainer
        self._recorder = recorder
        self.places: leader_output.Places | None = None
        """Where rank 0 writes; None until that is agreed, in the job's first step."""
        self._loaded: dict[str, Any] | None = None
        self._travel = CallbackState()

    def moved_on(self) -> None:
        """A step is over: what was loaded is no longer what is here."""
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
            # By these ModelCheckpoint decides, on each worker for itself, whether all are to save.
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
        # The first batch here is not the first of the epoch, at which values are forgotten.
        connector._first_loop_iter = True
        self._loaded = state


def restore(callback: Any, state: dict[str, Any]) -> None:
    """Load a callback's state, whole: some leave out what they save, and would hand the next worker another state."""
    callback.load_state_dict(state)
    own = callback.state_dict()
    for name, value in state.items():
        # What is saved in another form, as an enumeration's value, is not what the attribute holds.
        if name in vars(callback) and own.get(name, vars(callback)[name]) is vars(callback)[name]:
            setattr(callback, name, value)
