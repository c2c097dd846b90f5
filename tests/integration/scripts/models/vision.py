"""Images: batch norm, dropout, augmentation, a frozen stem that thaws, parameter groups, a schedule, noise, an average."""

import argparse
import random
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import Dataset

import craft
from craft import testing

parser = argparse.ArgumentParser()
parser.add_argument("--loaders", type=int, default=0)
options = parser.parse_args()
testing.arm()


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Augments with random numbers from everywhere."""

    def __init__(self) -> None:
        self._images = torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self._images[index]
        if random.random() < 0.5:
            image = image.flip(-1)
        image = image.roll(int(numpy.random.randint(3)), dims=1)
        return image + 0.1 * torch.randn(3, 8, 8), index % 4


class Net(torch.nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.body = torch.nn.Conv2d(8, 8, 3, padding=1)
        self.head = torch.nn.Linear(8, 4)
        # Changed by the forward pass as well, by putting another tensor in its place; not contiguous.
        self.register_buffer("scale", torch.ones(2, 4).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.norm(self.stem(x)))
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * hidden.detach().abs().mean()
        hidden = F.dropout(self.body(hidden), 0.3, self.training) * self.scale[0, 0]
        return self.head(hidden.mean(dim=(2, 3)))  # type: ignore[no-any-return]


class MovingAverage:
    """Of parameters and buffers; the script's own code."""

    def __init__(self, net: torch.nn.Module) -> None:
        self._averages = {name: value.detach().clone() for name, value in net.state_dict().items()}
        self._updates = 0

    @torch.no_grad()
    def update(self, net: torch.nn.Module) -> None:
        self._updates += 1
        for name, value in net.state_dict().items():
            average = self._averages[name]
            average.copy_(average * 0.9 + value * 0.1 if value.is_floating_point() else value)

    def state_dict(self) -> dict[str, Any]:
        return {"averages": self._averages, "updates": self._updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._averages, self._updates = state["averages"], state["updates"]


torch.manual_seed(0)
model = Net().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
model.stem.requires_grad_(False)
optimizer = torch.optim.SGD(
    [
        {"params": [*model.stem.parameters(), *model.body.parameters()], "lr": 0.05, "weight_decay": 0.01},
        {"params": [*model.norm.parameters(), *model.head.parameters()], "lr": 0.1},
    ],
    momentum=0.9,
    nesterov=True,
)
scheduler = torch.optim.lr_scheduler.SequentialLR(
    optimizer,
    [
        torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3),
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3]),
    ],
    [3],
)
average = MovingAverage(model)

job = craft.join()
model = job.replicate(model)
job.register(optimizer=optimizer, scheduler=scheduler, average=average)
for step in job.steps(Images(), global_batch=16, microbatches=7, steps=8, seed=3, num_workers=options.loaders):
    if step.number == 3:
        model.stem.requires_grad_(True)
    if step.number == 6:
        model.body.requires_grad_(False)
    optimizer.zero_grad()
    for x, y in step:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        step.log(loss=loss)
    norm = clip_grad_norm_(model.parameters(), 0.5)
    for param in model.parameters():
        if param.grad is not None:
            param.grad += 0.01 * torch.randn_like(param) * random.random() * float(numpy.random.random())
    optimizer.step()
    scheduler.step()
    average.update(model)
