"""What workers tell each other when their scripts froze parameters."""

from __future__ import annotations

import pytest
import torch

from craft.protocol.errors import ConfigError
from craft.worker.monitor.frozen_parameters import compare, encode


@pytest.fixture
def modules() -> dict[str, torch.nn.Module]:
    tied = torch.nn.Linear(3, 3)
    return {
        "model": torch.nn.Sequential(tied, torch.nn.Linear(3, 3)),
        "other": torch.nn.Sequential(tied, torch.nn.Linear(3, 3)),
    }


def test_workers_that_froze_the_same_go_on(modules: dict[str, torch.nn.Module]) -> None:
    trained = [True, False, True, True, False, False]
    compare([encode("w0", trained), encode("w1", trained)], 4, modules)
    compare([encode("w0", trained)], 4, modules)


def test_the_message_names_the_workers_and_the_parameters(modules: dict[str, torch.nn.Module]) -> None:
    parts = [
        encode("w0", [True, True, True, True, False, False]),
        encode("w1", [True, True, True, True, True, True]),
        encode("w2", [True, True, True, True, False, False]),
    ]
    with pytest.raises(
        ConfigError, match=r"before step 4 .*: w1 trains other\.1\.weight, other\.1\.bias, w0, w2 not\."
    ):
        compare(parts, 4, modules)


def test_of_many_parameters_only_some_are_named() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(8)))
    parts = [encode("w0", [False] * 16), encode("w1", [True] * 16)]
    with pytest.raises(
        ConfigError, match=r"w1 trains model\.0\.weight, model\.0\.bias, model\.1\.weight and 13 more, w0 not"
    ):
        compare(parts, 4, {"model": model})
