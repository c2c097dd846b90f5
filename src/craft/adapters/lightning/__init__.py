"""Lightning 2.x, as ``lightning`` and as ``pytorch_lightning``: ``Trainer(strategy="craft")``, started by ``craft run``.

A worker imports this package when its script imports Lightning (``worker/adapters.py``); it registers the strategy by name.
Outside of ``craft run``, ``import craft.adapters.lightning`` does the same. See docs/lightning.md.
"""

from __future__ import annotations

from craft.adapters.lightning.packages import register

__all__ = ["register"]

register()
