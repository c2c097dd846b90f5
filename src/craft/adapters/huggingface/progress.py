"""The Trainer's progress as part of the training state, for joining workers and resumed jobs.

``TrainerProgress`` has its counters and what they decide by; ``TrainerCallbackStates`` the rest: logs and callback states.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import ExportableState

from craft.adapters.callback_state import CallbackState

Broadcast = Callable[[Any], Any]
"""Returns rank 0's value on every worker."""

_FILE = "craft_progress.json"
"""File in a checkpoint of the Trainer."""
_COUNTED = ("global_step", "epoch", "best_metric", "best_global_step")
_NOTED = ("num_input_tokens_seen", "best_model_checkpoint")


class TrainerProgress:
    """Counters and the unlogged loss at a step boundary; while a step is computed, those of the previous boundary."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.loaded = False
        """Whether a state was loaded, so that the loop continues from there."""
        self.usual_items: float | None = None
        """Items of a microbatch in the first step that had any."""
        self._losses: dict[str, Any] = {
            "since_logged": 0.0,
            "total": 0.0,
            "logged_at": trainer.state.global_step,
            "began_at": trainer.state.global_step,
        }
        self._runs = False

    def state_dict(self) -> dict[str, Any]:
        if self._runs:
            trainer = self._trainer
            self._losses = {
                "since_logged": float(trainer._tr_loss),
                "total": trainer._total_loss_scalar,
                "logged_at": trainer._globalstep_last_logged,
                "began_at": trainer._initial_global_step,
            }
        counted = {name: getattr(self._trainer.state, name) for name in _COUNTED}
        return {**counted, **self._losses, "usual_items": self.usual_items}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in _COUNTED:
            setattr(self._trainer.state, name, state[name])
        self._losses = {name: state[name] for name in self._losses}
        self.usual_items = state["usual_items"]
        self.loaded = True

    def save(self, folder: str) -> None:
        """Add to a checkpoint of the Trainer what it takes to continue with the same bits."""
        Path(folder, _FILE).write_text(json.dumps({"usual_items": self.usual_items}))

    def go_on_from(self, folder: str) -> None:
        """Read that from a checkpoint; one that plain ``Trainer`` wrote does not have it."""
        file = Path(folder, _FILE)
        if file.is_file():
            self.usual_items = json.loads(file.read_text())["usual_items"]

    def run(self) -> None:
        """Restore the counters when the loop begins its first epoch here, having reset them."""
        if not self._runs:
            trainer, losses = self._trainer, self._losses
            # In host memory, like the losses of steps: reading it needs no device.
            trainer._tr_loss = torch.tensor(losses["since_logged"])
            trainer._total_loss_scalar = losses["total"]
            trainer._globalstep_last_logged = losses["logged_at"]
            trainer._initial_global_step = losses["began_at"]
            self._runs = True


class TrainerCallbackStates:
    """Logs and callback states: they travel with the state, but need not have the same bits.

    All donors send the same: on every worker the log, with its times, is that of rank 0.
    """

    beside_the_state = True

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._travel = CallbackState()
        self._agreed = 0
        """Number of log entries that are rank 0's on every worker."""
        self.output_dir: str | None = None
        """Where rank 0 writes; None until the first step of the job agrees on it."""

    def agree_on_place(self, broadcast: Broadcast) -> None:
        """After a commit: use rank 0's output directory."""
        if self.output_dir is None:
            self.output_dir = self._trainer.args.output_dir = broadcast(self._trainer.args.output_dir)

    def agree_on_log(self, broadcast: Broadcast) -> None:
        """Replace what every worker has logged by rank 0's entries."""
        log = self._trainer.state.log_history
        log[self._agreed :] = broadcast([_plain(entry) for entry in log[self._agreed :]])
        self._agreed = len(log)

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            **{name: getattr(trainer.state, name) for name in _NOTED},
            "total_flos": trainer.state.total_flos + trainer.current_flos,
            "log_history": trainer.state.log_history[: self._agreed],
            "output_dir": self.output_dir,
            "callbacks": dict(self._callbacks()),
        }

    def _callbacks(self) -> Iterator[tuple[str, Any]]:
        for key, callback in self._stateful():
            attributes = callback.state()["attributes"]
            if attributes and self._travel.allows(key, attributes):
                yield key, attributes

    def _stateful(self) -> Iterator[tuple[str, Any]]:
        for index, callback in enumerate(self._trainer.callback_handler.callbacks):
            if isinstance(callback, ExportableState):
                yield f"{index}.{type(callback).__name__}", callback

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        for name in (*_NOTED, "total_flos", "log_history"):
            setattr(trainer.state, name, state[name])
        trainer.current_flos = 0
        self._agreed, self.output_dir = len(state["log_history"]), state["output_dir"]
        if self.output_dir is not None:
            trainer.args.output_dir = self.output_dir
        for key, callback in self._stateful():
            for name, value in state["callbacks"].get(key, {}).items():
                setattr(callback, name, value)


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    """Return logged values as numbers and strings."""
    numbers = {key: value.item() if hasattr(value, "item") else value for key, value in entry.items()}
    return {key: value if isinstance(value, int | float | None) else str(value) for key, value in numbers.items()}
