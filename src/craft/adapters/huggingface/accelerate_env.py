"""Make accelerate see a worker as a single process, on the worker's device, with the job's rank for writing."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from accelerate.state import PartialState
from transformers import TrainingArguments

from craft.settings.environ import hidden_from_accelerate
from craft.settings.worker import WorkerSettings
from craft.worker.membership.devices import own_device


class _AloneProperty(cached_property):  # type: ignore[type-arg]
    """The property of ``TrainingArguments`` that looks for processes and devices; it finds no other process."""

    def __init__(self, own: Any) -> None:
        def set_up(arguments: Any) -> Any:
            with hidden_from_accelerate():
                found = own.func(arguments)
            return _take_device(arguments, found)

        super().__init__(set_up)


def _take_device(arguments: Any, found: torch.device) -> torch.device:
    """Return the worker's GPU, where a single process would take all; the CPU if the script wants it."""
    if found.type != "cuda":
        return found
    device = own_device(WorkerSettings.from_environment().local_rank)
    arguments._n_gpu = 1
    PartialState().device = device
    torch.cuda.set_device(device)
    return device


def keep_alone() -> None:
    """Make ``TrainingArguments`` in a worker those of one process, from now on. Can be repeated."""
    own: Any = vars(TrainingArguments)["_setup_devices"]
    if WorkerSettings.from_environment().socket is not None and not isinstance(own, _AloneProperty):
        TrainingArguments._setup_devices = _AloneProperty(own)
        TrainingArguments._setup_devices.__set_name__(TrainingArguments, "_setup_devices")


def use_one_gpu(trainer: Any) -> None:
    """Outside of ``craft run``: keep a Trainer that sees several GPUs from splitting each batch over them (DataParallel)."""
    if trainer.args.n_gpu > 1:
        trainer.args._n_gpu = 1
        trainer._train_batch_size = trainer.args.train_batch_size


def take_rank(rank: int) -> None:
    """Give accelerate's state the job's rank: it and the Trainer let rank 0 write."""
    state = PartialState()
    state.process_index = state.local_process_index = rank
