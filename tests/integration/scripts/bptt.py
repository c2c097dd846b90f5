"""A small LSTM language model, by truncated backpropagation through time: the hidden state is carried from step to step.

The text is cut into as many columns as there are microbatches times their batch size; each step reads on in every column.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

import craft
from craft import testing

COLUMNS, LENGTH, SYMBOLS, WIDTH = 2, 5, 11, 12

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--microbatches", type=int, default=6)
parser.add_argument("--slow-until", type=Path, help="steps take longer until there is such a file")
arguments = parser.parse_args()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(SYMBOLS, WIDTH)
        self.lstm = torch.nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.drop = torch.nn.Dropout(0.1)
        self.out = torch.nn.Linear(WIDTH, SYMBOLS)

    def forward(
        self, x: torch.Tensor, hidden: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        seen, hidden = self.lstm(self.drop(self.embedding(x)), hidden)
        return self.out(seen), hidden


testing.arm()
job = craft.join()
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
model = Model().to(job.device)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
job.replicate(model)
job.register(optimizer=optimizer)
columns = arguments.microbatches * COLUMNS
text = (
    torch.randint(0, SYMBOLS, (columns, 40 * LENGTH + 1), generator=torch.Generator().manual_seed(1)).cumsum(1)
    % SYMBOLS
)


def stream(microbatch: int, num_microbatches: int, start_step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    mine = text[microbatch * COLUMNS : (microbatch + 1) * COLUMNS]
    for step in range(start_step, 10**6):
        begin = step * LENGTH % (40 * LENGTH)
        yield mine[:, begin : begin + LENGTH], mine[:, begin + 1 : begin + LENGTH + 1]


def nothing() -> tuple[torch.Tensor, torch.Tensor]:
    zeros = torch.zeros(1, COLUMNS, WIDTH, device=job.device)
    return zeros, zeros


noise = torch.Generator(job.device).manual_seed(3)
for step in job.steps(stream, microbatches=arguments.microbatches, steps=arguments.steps, seed=2):
    optimizer.zero_grad()
    for x, y in step:
        x, y = x.to(job.device), y.to(job.device)
        lane = step.carry(hidden=nothing, noise=noise, steps=0, reset=step.number % 40 == 0)
        assert lane.steps == step.number % 40, (lane.steps, step.number)
        out, lane.hidden = model(x, lane.hidden)
        out = out + 0.01 * torch.randn(out.shape, generator=lane.noise, device=job.device)
        loss = F.cross_entropy(out.flatten(0, 1), y.flatten())
        loss.backward()
        lane.steps += 1
        step.log(loss=loss)
        testing.reach("computed", step.number)
    optimizer.step()
    if arguments.slow_until is not None and not arguments.slow_until.exists():
        time.sleep(0.15)
