"""Check that code between the steps freezes the same parameters on every worker.

Gradients travel without their lengths. If workers laid them out differently, Gloo would crash one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from craft.protocol.errors import ConfigError
from craft.worker.reduce.buckets import bitmap
from craft.worker.state.metadata import named_parameters

CALL = "a change of requires_grad"
"""How messages name the call that compares them."""
_SHOWN = 3


def encode(worker_id: str, trainable: Sequence[bool]) -> bytes:
    """Return the message of one worker: which parameters it trains."""
    return msgspec.msgpack.encode((worker_id, bitmap(trainable)))


def compare(parts: Sequence[bytes], step: int, modules: Mapping[str, torch.nn.Module]) -> None:
    """Raise ConfigError if workers train different parameters from ``step`` on."""
    masks = dict(msgspec.msgpack.decode(part, type=tuple[str, bytes]) for part in parts)
    if len(set(masks.values())) < 2:
        return
    trains = {
        name: tuple(worker_id for worker_id, each in masks.items() if each[index // 8] >> index % 8 & 1)
        for index, name in enumerate(_names(modules))
    }
    some = next(each for each in trains.values() if 0 < len(each) < len(masks))
    differing = [name for name, each in trains.items() if each == some]
    more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    raise ConfigError(
        f"before step {step} the script freezes other parameters on some workers than on others: {', '.join(some)}"
        f" {'trains' if len(some) == 1 else 'train'} {', '.join(differing[:_SHOWN])}{more},"
        f" {', '.join(each for each in masks if each not in some)} not. Set requires_grad on every worker at the same step"
    )


def _names(modules: Mapping[str, torch.nn.Module]) -> list[str]:
    """Return the names of all parameters, shared ones once, in the order of the exchange."""
    named: dict[torch.nn.Parameter, str] = {}
    for name, param in named_parameters(modules):
        named.setdefault(param, name)
    return list(named.values())
