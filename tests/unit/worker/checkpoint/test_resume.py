"""Scripts that go on from their own file and do not say so: which state shows it, and which does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from craft.worker.checkpoint.resume import forgotten_start_step


def trained(kind: type[torch.optim.Optimizer], **more: Any) -> torch.optim.Optimizer:
    optimizer = made(kind, **more)
    for _ in range(3):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        optimizer.step()
    return optimizer


def made(kind: type[torch.optim.Optimizer], **more: Any) -> torch.optim.Optimizer:
    return kind([torch.nn.Parameter(torch.ones(2))], lr=0.1, **more)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_an_optimizer_that_counts_its_steps_is_warned_of_with_their_number(kind: type[torch.optim.Optimizer]) -> None:
    loaded = made(kind)
    loaded.load_state_dict(trained(kind).state_dict())
    found = forgotten_start_step({"optimizer": loaded})
    assert found is not None and f"optimizer ({kind.__name__}) has made 3 steps already" in found
    assert "start_step=N" in found
    assert forgotten_start_step({"optimizer": made(kind)}) is None


def test_momentum_shows_it_without_a_number() -> None:
    found = forgotten_start_step({"optimizer": trained(torch.optim.SGD, momentum=0.9)})
    assert found is not None and "optimizer (SGD) has made steps already" in found


def test_what_has_no_such_state_is_left_alone() -> None:
    optimizer = trained(torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    pretrained = torch.nn.Linear(2, 2)
    assert forgotten_start_step({"optimizer": optimizer, "scheduler": scheduler, "average": pretrained}) is None


def test_a_scheduler_that_has_gone_on_shows_it() -> None:
    optimizer = made(torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    optimizer.step()
    scheduler.step()
    found = forgotten_start_step({"optimizer": optimizer, "scheduler": scheduler})
    assert found is not None and found.startswith("scheduler (StepLR) has made steps already")


def test_a_chain_of_schedulers_shows_what_those_inside_it_have_done() -> None:
    optimizer = made(torch.optim.SGD)
    inside = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), torch.optim.lr_scheduler.StepLR(optimizer, 5)]
    chain = torch.optim.lr_scheduler.ChainedScheduler(inside)
    assert forgotten_start_step({"scheduler": chain}) is None
    optimizer.step()
    chain.step()
    found = forgotten_start_step({"scheduler": chain})
    assert found is not None and found.startswith("scheduler (ChainedScheduler) has made steps already")
