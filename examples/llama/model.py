"""A transformer in the manner of Llama: RMS norm, rotary positions, SwiGLU, causal attention. For both scripts beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    hidden: int
    tokens: int = 32000


SIZES = {
    "tiny": Size(layers=2, width=64, heads=4, hidden=160, tokens=256),
    "small": Size(layers=8, width=512, heads=8, hidden=1408),
    "1b": Size(layers=16, width=2048, heads=16, hidden=5632),
}
"""By name; "1b" has 0.95 billion parameters."""


class Attention(nn.Module):
    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = size.heads, dropout
        self.taken = nn.Linear(size.width, 3 * size.width, bias=False)
        self.given = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.taken(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        drop = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(rotate(q, turn), rotate(k, turn), v, dropout_p=drop, is_causal=True)
        given: torch.Tensor = self.given(mixed.transpose(1, 2).reshape(batch, length, width))
        return given


def rotate(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Turn each pair of numbers by the angle of its position."""
    cos, sin = turn[0, : x.shape[-2]].to(x.dtype), turn[1, : x.shape[-2]].to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Layer(nn.Module):
    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.attention = Attention(size, dropout)
        self.up = nn.Linear(size.width, 2 * size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x), turn)
        gate, up = self.up(self.second(x)).chunk(2, dim=-1)
        down: torch.Tensor = self.down(F.silu(gate) * up)
        return x + down


class Llama(nn.Module):
    turn: torch.Tensor

    def __init__(self, size: Size, length: int = 2048, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.tokens, size.width)
        self.layers = nn.ModuleList(Layer(size, dropout) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.tokens, bias=False)
        half = size.width // size.heads // 2
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("turn", torch.stack((angles.cos(), angles.sin())), persistent=False)
        for param in self.parameters():
            if param.dim() == 2:
                nn.init.normal_(param, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.turn)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def loss_of(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    """How badly each token of ``text`` is foreseen from those before it."""
    logits = model(text[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())


class Text(torch.utils.data.Dataset[torch.Tensor]):
    """Made up: what follows a token is mostly decided by it. ``samples`` pieces of ``length`` tokens and one more."""

    def __init__(self, samples: int, length: int, tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)
        follows = torch.randint(0, tokens, (tokens, 4), generator=generator)
        choices = torch.randint(0, 4, (samples, length), generator=generator)
        column = torch.randint(0, tokens, (samples,), generator=generator)
        columns = [column]
        for place in range(length):
            column = follows[column, choices[:, place]]
            columns.append(column)
        self._text = torch.stack(columns, dim=1)

    def __len__(self) -> int:
        return len(self._text)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._text[index]
