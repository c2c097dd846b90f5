"""accelerate, in a process that is a worker of a job: alone as far as it knows, on the worker's own device, and of the job's
rank where it writes."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from accelerate.state import PartialState
from transformers import TrainingArguments

from craft.settings.environ.huggingface import alone
from craft.settings.worker import WorkerSettings
from craft.worker.membership.devices import own_device


class _AloneProperty(cached_property):  # type: ignore[type-arg]
    """The property of ``TrainingArguments`` that looks for other processes, which finds none, and for devices."""

    def __init__(self, own: Any) -> None:
        def set_up(arguments: Any) -> Any:
            with alone():
                found = own.func(arguments)
            return _take_device(arguments, found)

        super().__init__(set_up)


def _take_device(arguments: Any, found: torch.device) -> torch.device:
    """Where a process that is alone would take all GPUs, the worker's own. On the CPU, if the script wants to be there."""
    if found.type != "cuda":
        return found
    device = own_device(WorkerSettings.from_environment().local_rank)
    arguments._n_gpu = 1
    PartialState().device = device
    torch.cuda.set_device(device)
    return device


def keep_alone() -> None:
    """In a worker, ``TrainingArguments`` that are made from now on are those of one process. Can be repeated."""
    own: Any = vars(TrainingArguments)["_setup_devices"]
    if WorkerSettings.from_environment().socket is not None and not isinstance(own, _AloneProperty):
        TrainingArguments._setup_devices = _AloneProperty(own)
        TrainingArguments._setup_devices.__set_name__(TrainingArguments, "_setup_devices")


def use_one_gpu(trainer: Any) -> None:
    """Outside of ``craft run``: a Trainer that sees several GPUs would cut each batch over all of them (DataParallel)."""
    if trainer.args.n_gpu > 1:
        trainer.args._n_gpu = 1
        trainer._train_batch_size = trainer.args.train_batch_size


def take_rank(rank: int) -> None:
    """Whoever has rank 0 writes: accelerate and the Trainer ask this state."""
    state = PartialState()
    state.process_index = state.local_process_index = rank
