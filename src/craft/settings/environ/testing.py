"""What the environment says to ``craft.testing``."""

from __future__ import annotations

import os

FAULTS = "CRAFT_TEST_FAULTS"
"""Holds the faults to place, as a JSON list."""


def read_faults() -> str | None:
    """The text of ``CRAFT_TEST_FAULTS``; None where no fault is to be placed."""
    return os.environ.get(FAULTS) or None
