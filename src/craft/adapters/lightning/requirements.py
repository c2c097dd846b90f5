"""The two packages that Lightning comes as, each with classes of its own: which are there, and the strategy in each."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from typing import Any

from craft.adapters.package_versions import dotted, is_between
from craft.protocol.errors import ConfigError

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
NAME = "craft"
_DESCRIPTION = "workers of a CRAFT job: goes on through losses, joins, drains and restarts with the same bits"
_OLDEST, _NEXT = (2, 4), (3, 0)


def register(package: str | None = None) -> None:
    """Register ``strategy="craft"`` with a Lightning that is imported, or with the one that is installed. Can be repeated."""
    package = package or imported()
    registry = importlib.import_module(f"{package}.strategies").StrategyRegistry
    if NAME not in registry:
        registry.register(NAME, strategy_class(package), description=_DESCRIPTION)


@functools.cache
def strategy_class(package: str) -> Any:
    """The strategy as a subclass of this package's own ``Strategy``."""
    from craft.adapters.lightning.strategy import CraftStrategy

    base = importlib.import_module(f"{package}.strategies").Strategy
    own = {"__doc__": CraftStrategy.__doc__, "__module__": __name__, "package": package}
    return type("CraftStrategy", (CraftStrategy, base), own)


def callback_class(package: str) -> Any:
    """The callback as a subclass of this package's own ``Callback``."""
    from craft.adapters.lightning.beside.callback import CraftCallback

    base = importlib.import_module(f"{package}.callbacks").Callback
    return type("CraftCallback", (CraftCallback, base), {"__doc__": CraftCallback.__doc__, "__module__": __name__})


def imported() -> str:
    """The package that the script has imported, or the one that is installed."""
    for package in PACKAGES:
        if package in sys.modules:
            return package
    for package in PACKAGES:
        if importlib.util.find_spec(package.partition(".")[0]) is not None:
            return package
    raise ConfigError("neither lightning nor pytorch_lightning is installed: pip install 'craft[lightning]'")


def check_version(package: str, version: str) -> None:
    """Raise ConfigError unless this is a version whose loops are known here."""
    if not is_between(version, _OLDEST, _NEXT):
        raise ConfigError(
            f"{package} {version} is installed, and CRAFT works with Lightning from {dotted(_OLDEST)} on, below"
            f" {dotted(_NEXT)}: pip install 'craft[lightning]'"
        )
