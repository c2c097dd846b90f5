"""Lightning 2.x, as ``lightning`` and as ``pytorch_lightning``: ``Trainer(strategy="craft")``, started by ``craft run``.

A worker imports this package when its script imports Lightning (``worker/entry/framework_imports.py``); it registers the
strategy by name. Outside of ``craft run``, ``import craft.adapters.lightning`` does the same. See docs/tutorials/lightning.md.
"""

from __future__ import annotations

from typing import Any

from craft.adapters.lightning.registration import imported, register

__all__ = ["CraftCallback", "CraftStrategy"]

register()


def __getattr__(name: str) -> Any:
    """Return a class for the Lightning that the script has imported: each of the two packages has its own base classes."""
    if name == "CraftStrategy":
        from craft.adapters.lightning.strategy import strategy_class

        return strategy_class(imported())
    if name == "CraftCallback":
        from craft.adapters.lightning.beside.callback import callback_class

        return callback_class(imported())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
