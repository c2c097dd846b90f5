"""What a script may log."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch

from craft.protocol.errors import ConfigError
from craft.worker.report.metrics import RESERVED, checked


def test_numbers_become_floats_and_tensors_are_detached_without_being_read() -> None:
    loss = torch.ones(1, requires_grad=True)
    found = checked("step.log", {"loss": loss, "n": 3, "half": Fraction(1, 2), "on": True})
    tensor = found.pop("loss")
    assert isinstance(tensor, torch.Tensor) and not tensor.requires_grad and tensor.data_ptr() == loss.data_ptr()
    assert found == {"n": 3.0, "half": 0.5, "on": 1.0}


@pytest.mark.parametrize(
    "value", ["1.5", b"1", None, [1.0], 10**400, torch.ones(2), torch.ones(1, dtype=torch.complex64)]
)
def test_anything_else_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"step\.log\(x=.*a metric is one real number"):
        checked("step.log", {"x": value})


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_names_that_craft_writes_are_reserved(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"attempt\.log\({name}=\.\.\.\): {name} is reserved"):
        checked("attempt.log", {name: 1.0})
