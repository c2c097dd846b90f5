"""Check what a script logs: real numbers, under names that CRAFT does not use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from craft.protocol.errors import ConfigError

RESERVED = frozenset({"step", "branch", "time", "checksum"})
"""Keys that CRAFT writes in every line of ``metrics.jsonl``."""


def checked(call: str, scalars: Mapping[str, Any]) -> dict[str, float | torch.Tensor]:
    """Return the metrics given to ``call``; raise ConfigError if one cannot be logged.

    The value of a tensor is not read: that would wait for its device.
    """
    for name in scalars:
        if name in RESERVED:
            raise ConfigError(
                f"{call}({name}=...): {name} is reserved: CRAFT writes it to metrics.jsonl; give the metric another name"
            )
    return {name: _number(call, name, value) for name, value in scalars.items()}


def _number(call: str, name: str, value: Any) -> float | torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            kind = f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
            raise ConfigError(f"{call}({name}=...): a metric is one real number, not {kind}")
        return value.detach()
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ConfigError(f"{call}({name}={value!r:.80}): a metric is one real number")
