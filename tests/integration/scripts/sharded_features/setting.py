"""What the scripts of this folder share: the job, a small language model, made-up text, a pause that a test can end."""

from __future__ import annotations

import argparse
import faulthandler
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import craft
from craft import testing

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument(
    "--slow", type=float, default=0.0, help="seconds of each microbatch, until the file `hurry` is there"
)

TOKENS, WIDTH, LENGTH = 40, 32, 8


def join() -> craft.Job:
    """Return the job; a test may have placed faults in it, or ask for stacks."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    testing.arm()
    job = craft.join()
    torch.manual_seed(0)
    return job


def pause(seconds: float) -> None:
    """Make a microbatch last; the bits do not depend on it."""
    if seconds and not Path("hurry").exists():
        time.sleep(seconds)


class Block(nn.Module):
    """A feed-forward block with dropout."""

    def __init__(self, width: int = WIDTH, hidden: int = 2 * WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        return out


class Tower(nn.Module):
    """An embedding, blocks, and a head."""

    def __init__(self, blocks: int = 2, width: int = WIDTH, hidden: int = 2 * WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def text() -> TensorDataset:
    """Return made-up pieces of text."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(0, TOKENS, (256, LENGTH + 1), generator=generator))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return how badly each token is foreseen from those before it."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
