"""A small but real training job for ``craft demo``: a character-level transformer that learns to write ship's logs.

craft run --workers 4 -m craft.testing.demo_job --steps 300
"""

from __future__ import annotations

import argparse
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import Dataset

import craft

_SUBJECTS = ("the keeper", "a sailor", "the pilot", "the captain", "an old mate", "the cook", "a stranger")
_VERBS = ("saw", "lost", "found", "mended", "hailed", "followed", "feared")
_OBJECTS = ("the light", "a sail", "the anchor", "the tide", "a lantern", "the far shore", "her chart", "the fog")
_TIMES = ("at dawn", "before the storm", "in the night", "near the reef", "by noon", "as the wind fell")
CONTEXT = 48


def write_log(num_sentences: int, seed: int = 0) -> str:
    """Return a text with some grammar in it, always the same for the same seed."""
    draw = random.Random(seed)
    sentences = (
        f"{draw.choice(_SUBJECTS)} {draw.choice(_VERBS)} {draw.choice(_OBJECTS)} {draw.choice(_TIMES)}."
        for _ in range(num_sentences)
    )
    return " ".join(sentences)


class Characters(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of the text, and the same windows one character on."""

    def __init__(self, text: str) -> None:
        self.alphabet = sorted(set(text))
        index = {character: number for number, character in enumerate(self.alphabet)}
        self._codes = torch.tensor([index[character] for character in text])

    def __len__(self) -> int:
        return (len(self._codes) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = index * CONTEXT
        return self._codes[begin : begin + CONTEXT], self._codes[begin + 1 : begin + CONTEXT + 1]


class Transformer(nn.Module):
    """Predicts the next character."""

    def __init__(self, num_characters: int, width: int = 96, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_characters, width)
        self.position = nn.Parameter(torch.zeros(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, num_characters)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(codes.shape[1])
        hidden = self.blocks(self.embed(codes) + self.position[: codes.shape[1]], mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(hidden)
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    dataset = Characters(write_log(8000))
    model = Transformer(len(dataset.alphabet))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)

    job = craft.join()
    model = job.replicate(model)
    job.register(optimizer=optimizer, scheduler=scheduler)
    for step in job.steps(dataset, global_batch=32, microbatches=8, steps=steps, seed=0):
        optimizer.zero_grad()
        for x, y in step:
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            step.log(loss=loss)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()


if __name__ == "__main__":
    main()
