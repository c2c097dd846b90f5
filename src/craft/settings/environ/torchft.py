"""What torchft keeps in the environment."""

from __future__ import annotations

import os


def lighthouse_address() -> str | None:
    """Where torchft's managers find their lighthouse, as a URL; None if it is not said."""
    return os.environ.get("TORCHFT_LIGHTHOUSE") or None
