"""From a seed to a training script: draws an option for each axis, and puts their lines together."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from . import course, longer, mistakes, models, updates, wider
from .draft import Draft, render
from .options import AXES, BASIC, OPTIONS, Option

MODULES = (models, updates, course, longer, wider, mistakes)
"""Those that add options."""


@dataclass(frozen=True)
class Script:
    """A generated script, and what is known of it."""

    seed: int
    features: Mapping[str, str]
    """The option of each axis that has one."""
    text: str
    files: tuple[str, ...]
    """Files of tensors that it leaves."""

    @property
    def mistake(self) -> str | None:
        return self.features.get("mistake")

    @property
    def says(self) -> str:
        """A pattern of what a refusal may name."""
        return OPTIONS["mistake"][self.mistake].says if self.mistake else ""

    @property
    def title(self) -> str:
        return ", ".join(f"{axis} {name}" for axis, name in self.features.items())


def generate(seed: int, *, without: Collection[str] = (), given: Mapping[str, str] | None = None) -> Script:
    """The script of a seed; ``without`` some axes, or with ``given`` options on some."""
    features = _choose(seed, dict.fromkeys(without, "none") | dict(given or {}))
    draft = Draft()
    for axis in AXES:
        OPTIONS[axis][features[axis]].make(draft, random.Random(f"{seed} {axis} lines"))
    shown = {axis: name for axis, name in features.items() if name != "none"}
    title = f"Script {seed}: " + ", ".join(shown.values()).replace("_", " ") + "."
    return Script(seed=seed, features=shown, text=render(draft, title, seed), files=tuple(draft.files))


def _choose(seed: int, given: Mapping[str, str]) -> dict[str, str]:
    """An option for every axis; a mistake says what the script must be, then features in their order."""
    given = {axis: BASIC.get(axis, name) if name == "none" else name for axis, name in given.items()}
    chosen: dict[str, str] = {}
    fixed: dict[str, str] = {}
    first = ["mistake", *(axis for axis in given if axis != "mistake")]
    for axis in (*first, *(axis for axis in AXES if axis not in first)):
        name = fixed.get(axis) or given.get(axis) or _draw(seed, axis, fixed)
        found = OPTIONS[axis][name]
        chosen[axis] = name
        fixed = _ties(found) | fixed | {axis: name}
    return {axis: fixed[axis] for axis in AXES}


def _ties(option: Option) -> dict[str, str]:
    """What an option needs on other axes, and what the options that it needs need in turn."""
    ties = {axis: BASIC.get(axis, "none") for axis in option.bars} | dict(option.forces)
    for axis, name in tuple(ties.items()):
        ties = _ties(OPTIONS[axis][name]) | ties
    return ties


def _draw(seed: int, axis: str, fixed: Mapping[str, str]) -> str:
    """Draw an option that goes with what is fixed already."""
    fitting = {
        name: found.weight
        for name, found in OPTIONS[axis].items()
        if all(fixed.get(other, need) == need for other, need in _ties(found).items())
    }
    return random.Random(f"{seed} {axis}").choices([*fitting], [*fitting.values()])[0]
