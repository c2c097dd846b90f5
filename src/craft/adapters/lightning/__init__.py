"""Lightning 2.x, as ``lightning`` and as ``pytorch_lightning``: ``Trainer(strategy="craft")``, started by ``craft run``.

A worker imports this package when its script imports Lightning (``worker/adapters.py``); it registers the strategy by name.
Outside of ``craft run``, ``import craft.adapters.lightning`` does the same. See docs/lightning.md.
"""

from __future__ import annotations

from typing import Any

from craft.adapters.lightning import packages

__all__ = ["CraftCallback", "CraftStrategy"]

packages.register()


def __getattr__(name: str) -> Any:
    """Of the Lightning that the script has imported: each of the two packages has base classes of its own."""
    if name == "CraftStrategy":
        return packages.strategy_class(packages.imported())
    if name == "CraftCallback":
        return packages.callback_class(packages.imported())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
