"""torchft's environment variables."""

from __future__ import annotations

import os


def lighthouse_address() -> str | None:
    """Return the URL of torchft's lighthouse; None if it is not set."""
    return os.environ.get("TORCHFT_LIGHTHOUSE") or None
