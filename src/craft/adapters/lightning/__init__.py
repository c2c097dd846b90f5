"""Lightning 2.x, as ``lightning`` and as ``pytorch_lightning``: ``Trainer(strategy="craft")``, started by ``craft run``.

A worker imports this package when its script imports Lightning (``worker/entry/framework_imports.py``); it registers the
strategy by name. Outside of ``craft run``, ``import craft.adapters.lightning`` does the same. See docs/tutorials/lightning.md.
"""

from __future__ import annotations

from typing import Any

from craft.adapters.lightning import requirements

__all__ = ["CraftCallback", "CraftStrategy"]

requirements.register()


def __getattr__(name: str) -> Any:
    """Of the Lightning that the script has imported: each of the two packages has base classes of its own."""
    if name == "CraftStrategy":
        return requirements.strategy_class(requirements.imported())
    if name == "CraftCallback":
        return requirements.callback_class(requirements.imported())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
