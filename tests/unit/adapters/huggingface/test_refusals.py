"""What cannot work under CraftTrainer is refused with a sentence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.worker.alone import alone, has_trained

from craft.adapters.huggingface import refusals
from craft.protocol.errors import ConfigError
from craft.worker.api.job import Job

ARGUMENTS: dict[str, Any] = {
    "world_size": 1,
    "device": torch.device("cpu"),
    "parallelism_config": None,
    "auto_find_batch_size": False,
    "train_sampling_strategy": "random",
    "optim": "adamw_torch_fused",
    "enable_jit_checkpoint": False,
    "save_on_each_node": False,
}
OWN = {
    "is_deepspeed_enabled": False,
    "is_fsdp_enabled": False,
    "is_distributed_loading_by_transformers": False,
    "is_model_parallel": False,
}


def check(changed: dict[str, Any], trial: Any = None, job: Job | None = None) -> None:
    args = SimpleNamespace(**{name: changed.get(name, value) for name, value in ARGUMENTS.items()})
    own = {name: changed.get(name, value) for name, value in OWN.items()}
    refusals.check(SimpleNamespace(args=args, **own), job or alone(socket="agent"), trial)


@pytest.mark.parametrize("device", ["cpu", "cuda:3"])
def test_a_usual_trainer_is_not_refused(device: str) -> None:
    check({"device": torch.device(device)})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("world_size", 4, "start the script with craft run"),
        ("device", torch.device("mps"), "on mps: .*use_cpu=True"),
        ("parallelism_config", object(), "each has all of it"),
        ("is_deepspeed_enabled", True, "DeepSpeed"),
        ("is_fsdp_enabled", True, "FSDP"),
        ("is_model_parallel", True, "split over devices.* without device_map"),
        ("auto_find_batch_size", True, "auto_find_batch_size"),
        ("train_sampling_strategy", "batch_rebalance", "one of random, sequential, group_by_length"),
        ("optim", "lomo", "optim='lomo'"),
        ("optim", "galore_adamw_layerwise", "during backward"),
        ("enable_jit_checkpoint", True, "SIGTERM"),
        ("save_on_each_node", True, "one worker writes"),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(name: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check({name: value})


def test_a_search_for_hyperparameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="hyperparameter_search"):
        check({}, trial=object())


def test_a_second_train_is_refused_in_words_of_the_trainers() -> None:
    with pytest.raises(ConfigError, match=r"a second train\(\) in one script"):
        check({}, job=has_trained())
