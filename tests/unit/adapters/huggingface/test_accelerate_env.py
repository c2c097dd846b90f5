"""What a worker's ``TrainingArguments`` say of processes and devices, on a host that seems to have four GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from transformers import TrainingArguments

from craft.adapters.huggingface.accelerate_env import keep_alone, use_one_gpu

WORKER = {"CRAFT_SOCKET": "socket", "CRAFT_LOCAL_RANK": "5", "LOCAL_RANK": "5", "RANK": "13", "WORLD_SIZE": "16"}


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """The devices that became the current one, in turn."""
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    yield taken
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, current: list[torch.device]) -> list[torch.device]:
    """The same in a worker."""
    # Put back afterwards.
    monkeypatch.setattr(TrainingArguments, "_setup_devices", vars(TrainingArguments)["_setup_devices"])
    for name, value in WORKER.items():
        monkeypatch.setenv(name, value)
    keep_alone()
    return current


def arguments(**given: Any) -> Any:
    return TrainingArguments(report_to="none", per_device_train_batch_size=3, **given)


def test_a_worker_takes_one_gpu_by_its_place_on_the_host_and_knows_of_no_other(worker: list[torch.device]) -> None:
    found = arguments()
    assert found.device == PartialState().device == worker[-1] == torch.device("cuda", 1)
    assert (found.n_gpu, found.world_size, found.train_batch_size) == (1, 1, 3)
    assert found.parallel_mode.value == "not_parallel"


def test_a_worker_that_is_to_use_the_cpu_does(worker: list[torch.device]) -> None:
    found = arguments(use_cpu=True)
    assert found.device == PartialState().device == torch.device("cpu")
    assert (found.n_gpu, found.world_size, worker) == (0, 1, [])


@pytest.mark.usefixtures("current")
def test_a_script_that_nobody_started_beside_others_uses_one_gpu_of_several() -> None:
    found = arguments()
    assert (found.device, found.n_gpu, found.train_batch_size) == (torch.device("cuda", 0), 4, 12)
    trainer = SimpleNamespace(args=found, _train_batch_size=12)
    use_one_gpu(trainer)
    assert (found.n_gpu, found.train_batch_size, trainer._train_batch_size) == (1, 3, 3)
    assert found.parallel_mode.value == "not_parallel"
