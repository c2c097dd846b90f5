"""What a script builds and registers, in all the kinds that torch has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from craft.snapshots.state.leaves import digest, module_leaves, registered_leaves

schedule = torch.optim.lr_scheduler


class Job:
    """What a script builds: the same in every worker, but for the seed."""

    def __init__(self, build: Callable[[torch.nn.Module], dict[str, Any]], seed: int, dtype: torch.dtype) -> None:
        torch.manual_seed(seed)
        conv = torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        layers = [conv, torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(12, 3)]
        self.model = torch.nn.Sequential(*layers).to(dtype)
        self.model.register_buffer("unsaved", torch.rand(2), persistent=False)
        self.items = build(self.model)

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        return {"model": self.model}

    def step(self, number: int) -> None:
        optimizer = self.items["optimizer"]
        inputs = torch.rand(4, 2, 4, 4, generator=torch.Generator().manual_seed(number))
        inputs = inputs.to(next(self.model.parameters()).dtype)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = self.model(inputs).float().square().mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        for name, item in self.items.items():
            if isinstance(item, schedule.ReduceLROnPlateau):
                item.step(float(loss.detach()))
            elif isinstance(item, schedule.LRScheduler):
                item.step()
            elif name == "average":
                item.update_parameters(self.model)

    def digest(self) -> str:
        return digest(module_leaves(self.modules) + registered_leaves(self.items))


def only(make: Callable[..., Any], **settings: Any) -> Callable[[torch.nn.Module], dict[str, Any]]:
    return lambda model: {"optimizer": make(model.parameters(), **settings)}


def sgd_with(make: Callable[[Any], Any]) -> Callable[[torch.nn.Module], dict[str, Any]]:
    def build(model: torch.nn.Module) -> dict[str, Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return {"scheduler": make(optimizer), "optimizer": optimizer}

    return build


def with_average(model: torch.nn.Module) -> dict[str, Any]:
    return {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "average": torch.optim.swa_utils.AveragedModel(model, use_buffers=True),
        "scaler": torch.amp.GradScaler("cpu"),
    }


def two_groups(model: torch.nn.Module) -> dict[str, Any]:
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": torch.tensor(0.1)}, {"params": others, "lr": torch.tensor(0.01)}]
    return {"optimizer": torch.optim.Adam(groups, foreach=False)}


def lbfgs(model: torch.nn.Module) -> dict[str, Any]:
    # It takes no gradients in another order.
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return {"optimizer": torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")}


BUILDS = {
    "adamw": only(torch.optim.AdamW, amsgrad=True),
    "adamw fused": only(torch.optim.AdamW, fused=True),
    "adam without foreach": only(torch.optim.Adam, foreach=False),
    "adafactor": only(torch.optim.Adafactor),
    "adagrad": only(torch.optim.Adagrad),
    "nadam": only(torch.optim.NAdam),
    "asgd": only(torch.optim.ASGD),
    "rprop": only(torch.optim.Rprop),
    "lbfgs": lbfgs,
    "two groups with tensors for learning rates": two_groups,
    "lambda": sgd_with(lambda optimizer: schedule.LambdaLR(optimizer, lambda step: 0.9**step)),
    "one cycle": sgd_with(lambda optimizer: schedule.OneCycleLR(optimizer, 0.1, total_steps=20)),
    "cyclic": sgd_with(lambda optimizer: schedule.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3)),
    "plateau": sgd_with(lambda optimizer: schedule.ReduceLROnPlateau(optimizer, patience=0)),
    "multi step": sgd_with(lambda optimizer: schedule.MultiStepLR(optimizer, [1, 2, 4])),
    "warm restarts": sgd_with(lambda optimizer: schedule.CosineAnnealingWarmRestarts(optimizer, 2)),
    "swa": sgd_with(lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)),
    "chained": sgd_with(lambda optimizer: schedule.ChainedScheduler([schedule.ExponentialLR(optimizer, 0.9)])),
    "sequence": sgd_with(
        lambda optimizer: schedule.SequentialLR(
            optimizer, [schedule.LinearLR(optimizer, total_iters=2), schedule.CosineAnnealingLR(optimizer, 5)], [2]
        )
    ),
    "average and scaler": with_average,
}
