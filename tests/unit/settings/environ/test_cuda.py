"""How torch is kept from asking CUDA."""

from __future__ import annotations

import os

import pytest

from craft.settings.environ.cuda import without_cuda

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
