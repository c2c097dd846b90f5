"""A fast 64-bit hash of tensors' bytes, computed on their device; only the result is copied.

Each 64-bit word is multiplied by an odd number that depends on its position; the products are summed modulo 2**64. The sum does
not depend on the order of additions. A difference in a single word always changes it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import torch

_WORDS = 1 << 20
"""Words multiplied at once; longer data reuses the factors, with another factor per chunk."""
_SMALL_BYTES = 1 << 20
_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def fingerprint(parts: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the hash of bytes on ``device``, as one int64 there. ``parts`` are flat tensors of uint8."""
    total = torch.zeros(1, dtype=torch.int64, device=device)
    factors = _factors(device)
    number = 0
    for batch in _batches(parts):
        for chunk in _words(batch).split(_WORDS):
            number += 1
            total += (chunk * factors[: chunk.numel()]).sum() * _signed(number * _FACTOR | 1)
    return total


def _batches(parts: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Join small parts: on a device each operation costs about the same, whatever its size."""
    small: list[torch.Tensor] = []
    size = 0
    for part in parts:
        if part.numel() >= _SMALL_BYTES:
            yield part
            continue
        small.append(part)
        size += part.numel()
        if size >= _SMALL_BYTES:
            yield torch.cat(small)
            small, size = [], 0
    if small:
        yield torch.cat(small)


def _words(part: torch.Tensor) -> torch.Tensor:
    """Return the bytes as 64-bit words, padded with zeros."""
    missing = -part.numel() % 8
    if missing:
        part = torch.nn.functional.pad(part, (0, missing))
    elif part.storage_offset() % 8:
        part = part.clone()
    return part.view(torch.int64)


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """Return odd numbers, one for each position in a chunk."""
    places = torch.arange(1, _WORDS + 1, dtype=torch.int64, device=device) * _signed(_FACTOR)
    places ^= places >> 31
    return places * _signed(0xD6E8FEB86659FD93) | 1


def _signed(value: int) -> int:
    """Return the int64 with the lowest 64 bits of ``value``."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
