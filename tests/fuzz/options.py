"""The axes along which scripts differ, and the options of each; modules of features add theirs here.

An option is a function that adds to a draft what makes the feature. Each axis draws from the seed independently of all
others, so that leaving a feature out of a script changes nothing else in it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .draft import Draft

Make = Callable[[Draft, random.Random], None]

AXES = (
    "loop", "net", "norm", "noise", "partial", "second", "whole", "optimizer", "scheduler", "average", "precision", "gradients",
    "switch", "before", "data", "cut", "length", "weight", "memory", "evaluate", "calls", "checkpoints", "save", "stop", "after",
    "tail", "mistake",
)  # fmt: skip
"""In the order in which their options are applied."""
BASIC = {"loop": "steps", "net": "mlp", "optimizer": "sgd", "data": "tensors", "cut": "even", "length": "steps"}
"""What an axis has where a script must have something; the others have ``none``."""


@dataclass(frozen=True)
class Option:
    """One way to write a part of a script."""

    make: Make
    weight: float
    forces: Mapping[str, str] = field(default_factory=dict)
    """Axis to option: what the script must be for this to make sense."""
    bars: frozenset[str] = frozenset()
    """Axes that have ``none``, or the basic option, with this one."""
    says: str = ""
    """Of a mistake: a pattern of which something is in the sentence that refuses it."""


OPTIONS: dict[str, dict[str, Option]] = {axis: {} for axis in AXES}


def option(
    axis: str,
    name: str,
    weight: float = 1.0,
    *,
    forces: Mapping[str, str] | None = None,
    bars: str = "",
    says: str = "",
) -> Callable[[Make], Make]:
    """Add an option to an axis."""

    def add(make: Make) -> Make:
        assert name not in OPTIONS[axis], f"{axis} has {name} twice"
        OPTIONS[axis][name] = Option(make, weight, dict(forces or {}), frozenset(bars.split()), says)
        return make

    return add


def nothing(axis: str, weight: float) -> None:
    """Let scripts be without anything on an axis, so often."""
    option(axis, "none", weight)(lambda draft, draw: None)
