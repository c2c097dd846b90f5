"""Lightning's environment variables."""

from __future__ import annotations

import os


def global_seed() -> int:
    """Return the seed that the script gave to ``seed_everything``; 0 if it gave none."""
    return int(os.environ.get("PL_GLOBAL_SEED") or 0)
