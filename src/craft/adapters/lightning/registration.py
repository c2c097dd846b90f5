"""Register ``strategy="craft"`` with the Lightning package that a script uses."""

from __future__ import annotations

import importlib

from craft.adapters.lightning.requirements import imported
from craft.adapters.lightning.strategy import strategy_class

NAME = "craft"
_DESCRIPTION = "workers of a CRAFT job: goes on through losses, joins, drains and restarts with the same bits"


def register(package: str | None = None) -> None:
    """Register the strategy with an imported Lightning, or with the installed one. Can be repeated."""
    package = package or imported()
    registry = importlib.import_module(f"{package}.strategies").StrategyRegistry
    if NAME not in registry:
        registry.register(NAME, strategy_class(package), description=_DESCRIPTION)
