"""Refuse, before the first step, what a Trainer cannot do under CRAFT."""

from __future__ import annotations

from typing import Any

from craft.protocol.errors import ConfigError
from craft.worker.api.adapter_access import has_trained, is_alone, may_go_back
from craft.worker.api.job import Job

_ORDERS = ("random", "sequential", "group_by_length")


def check(trainer: Any, job: Job, trial: Any) -> None:
    """Raise ConfigError if training cannot begin with these arguments."""
    for refused, sentence in [*_placement(trainer), *_arguments(trainer.args, is_alone(job)), *_run(job, trial)]:
        if refused:
            raise ConfigError(sentence)


def _placement(trainer: Any) -> list[tuple[bool, str]]:
    """Processes, devices and sharding."""
    args = trainer.args
    return [
        (
            args.world_size > 1,
            f"accelerate sees {args.world_size} processes: start the script with craft run, and import"
            " craft.adapters.huggingface before TrainingArguments are made",
        ),
        (
            args.device.type not in ("cpu", "cuda"),
            f"CraftTrainer runs on CUDA devices and on the CPU, not on {args.device}: TrainingArguments(use_cpu=True)",
        ),
        (
            trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or args.parallelism_config is not None,
            "DeepSpeed, FSDP and parallelism_config shard a model over workers: under CraftTrainer each has all of it",
        ),
        (
            trainer.is_distributed_loading_by_transformers or trainer.is_model_parallel,
            f"the model is split over devices, or not on {args.device}: under CraftTrainer each worker has all of it on one"
            " device; load it without device_map",
        ),
    ]


def _arguments(args: Any, alone: bool) -> list[tuple[bool, str]]:
    optimizer = str(getattr(args.optim, "value", args.optim))
    return [
        (
            args.auto_find_batch_size and not alone,
            "TrainingArguments(auto_find_batch_size=True) changes the size of a step, and a job's microbatches"
            " never change: leave it out",
        ),
        (
            args.train_sampling_strategy not in _ORDERS,
            f"TrainingArguments(train_sampling_strategy={args.train_sampling_strategy!r}) makes an order that cannot be cut into"
            f" microbatches: one of {', '.join(_ORDERS)}",
        ),
        (
            "lomo" in optimizer or "layerwise" in optimizer,
            f"TrainingArguments(optim={optimizer!r}) updates parameters during backward, before other workers' gradients"
            " arrive: use another one",
        ),
        (
            args.enable_jit_checkpoint,
            "TrainingArguments(enable_jit_checkpoint=True) answers SIGTERM in each process by itself: leave it out, and use craft"
            " run --checkpoints",
        ),
        (
            args.save_on_each_node,
            "TrainingArguments(save_on_each_node=True): under CraftTrainer one worker writes; leave it out",
        ),
    ]


def _run(job: Job, trial: Any) -> list[tuple[bool, str]]:
    return [
        (
            has_trained(job),
            "a second train() in one script: a job has one, and its order of data goes on through all of it. Give the first more"
            " epochs or steps, or run a script for each with craft run",
        ),
        (
            trial is not None and not is_alone(job),
            "hyperparameter_search trains many models, and a job trains one: run a job for each",
        ),
        (
            may_go_back(job),
            "--on-divergence rollback is not there yet under CraftTrainer, whose loop cannot go back: skip, or stop",
        ),
    ]
