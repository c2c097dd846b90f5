"""Variables of other software are set and hidden for a while."""

from __future__ import annotations

import os

import pytest

from craft.settings.environ import hidden_from_accelerate, without_cuda

ASKS_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


@pytest.mark.parametrize("given", [None, "0"])
def test_torch_asks_nvml_for_a_while_unless_it_is_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.delenv(ASKS_NVML, raising=False)
    if given is not None:
        monkeypatch.setenv(ASKS_NVML, given)
    with without_cuda():
        assert os.environ[ASKS_NVML] == (given or "1")
    assert os.environ.get(ASKS_NVML) == given


def test_a_workers_place_is_hidden_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "PMI_SIZE": "4"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with hidden_from_accelerate():
        assert not place.keys() & os.environ.keys()
    assert {name: os.environ.get(name) for name in (*place, "LOCAL_WORLD_SIZE")} == {**place, "LOCAL_WORLD_SIZE": None}
