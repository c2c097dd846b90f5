"""Find the Lightning that a script uses, of the two packages it comes as, and register ``strategy="craft"`` with it."""

from __future__ import annotations

import importlib
import importlib.util
import sys

from craft.adapters.lightning.strategy import strategy_class
from craft.protocol.errors import ConfigError

NAME = "craft"
_DESCRIPTION = "workers of a CRAFT job: goes on through losses, joins, drains and restarts with the same bits"
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""Each has its own classes."""


def register(package: str | None = None) -> None:
    """Register the strategy with an imported Lightning, or with the installed one. Can be repeated."""
    package = package or imported()
    registry = importlib.import_module(f"{package}.strategies").StrategyRegistry
    if NAME not in registry:
        registry.register(NAME, strategy_class(package), description=_DESCRIPTION)


def imported() -> str:
    """Return the package that the script has imported, or else the installed one."""
    for package in _PACKAGES:
        if package in sys.modules:
            return package
    for package in _PACKAGES:
        if importlib.util.find_spec(package.partition(".")[0]) is not None:
            return package
    raise ConfigError("neither lightning nor pytorch_lightning is installed: pip install 'craft[lightning]'")
