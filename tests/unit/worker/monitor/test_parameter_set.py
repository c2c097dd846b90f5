"""Parameters that come into a module after its loop began."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from craft.protocol.errors import ConfigError
from craft.worker.monitor.parameter_set import ParameterSet


@pytest.fixture
def model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))


@pytest.fixture
def structure(model: torch.nn.Sequential) -> Iterator[ParameterSet]:
    structure = ParameterSet({"model": model})
    yield structure
    structure.close()


def test_a_module_that_is_added_is_refused_by_the_name_of_its_parameter(
    structure: ParameterSet, model: torch.nn.Sequential
) -> None:
    structure.check()
    model.append(torch.nn.Linear(2, 1))
    with pytest.raises(ConfigError, match=r"the parameter model\.2\.weight was put there after the loop began"):
        structure.check()


def test_a_parameter_in_the_place_of_another_is_refused(structure: ParameterSet, model: torch.nn.Sequential) -> None:
    model[1].weight = torch.nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ConfigError, match=r"model\.1\.weight"):
        structure.check()


def test_other_modules_and_changes_in_place_are_nobodys_business(
    structure: ParameterSet, model: torch.nn.Sequential
) -> None:
    torch.nn.Linear(3, 3)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.double()
    model[0].weight = model[0].weight
    torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))
    model.register_parameter("also", next(model.parameters()))
    structure.check()
