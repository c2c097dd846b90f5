"""Where the Trainer is, as a part of the training state: so that a worker that joins, or a job that resumes, is there, too.

``TrainerProgress`` has its counters, and what they decide by; ``TrainerCallbackStates`` what else it holds: logs, and the states of callbacks.
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
"""Returns what rank 0 gave, on every worker."""

_FILE = "craft_progress.json"
"""In a checkpoint of the Trainer's own."""
_COUNTED = ("global_step", "epoch", "best_metric", "best_global_step")
_NOTED = ("num_input_tokens_seen", "best_model_checkpoint")


class TrainerProgress:
    """Counters at a step boundary, and the loss since it was logged last; while a step is computed, those of the one before."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.loaded = False
        """Whether a state was loaded: the loop is to go on from there."""
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
        """Add to a checkpoint of the Trainer's own what it takes to go on from it with the same bits."""
        Path(folder, _FILE).write_text(json.dumps({"usual_items": self.usual_items}))

    def go_on_from(self, folder: str) -> None:
        """Take that from a checkpoint; one that ``Trainer`` wrote does not have it."""
        file = Path(folder, _FILE)
        if file.is_file():
            self.usual_items = json.loads(file.read_text())["usual_items"]

    def run(self) -> None:
        """The loop is about to begin with its first epoch here, and has set all of this to nothing."""
        if not self._runs:
            trainer, losses = self._trainer, self._losses
            # In the memory of the host, where the losses of steps come from: nobody waits for a device to look at it.
            trainer._tr_loss = torch.tensor(losses["since_logged"])
            trainer._total_loss_scalar = losses["total"]
            trainer._globalstep_last_logged = losses["logged_at"]
            trainer._initial_global_step = losses["began_at"]
            self._runs = True


class TrainerCallbackStates:
    """Logs and the states of callbacks: they travel with the state, and are no part of what must be the same bits.

    Whoever gives the state gives the same: so what is logged, with its times, is that of rank 0 on every worker.
    """

    beside_the_state = True

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._travel = CallbackState()
        self._agreed = 0
        """How many of the log's entries are those of rank 0 on every worker."""
        self.output_dir: str | None = None
        """Where rank 0 writes; None until that is agreed, in the job's first step."""

    def agree_on_place(self, broadcast: Broadcast) -> None:
        """After a commit: write where rank 0 does, if ever."""
        if self.output_dir is None:
            self.output_dir = self._trainer.args.output_dir = broadcast(self._trainer.args.output_dir)

    def agree_on_log(self, broadcast: Broadcast) -> None:
        """Where every worker has logged: what rank 0 has is what was logged."""
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
    """What was logged, as numbers and words."""
    numbers = {key: value.item() if hasattr(value, "item") else value for key, value in entry.items()}
    return {key: value if isinstance(value, int | float | None) else str(value) for key, value in numbers.items()}
