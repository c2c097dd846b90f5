"""The environment variable of ``craft.testing``."""

from __future__ import annotations

import os

FAULTS = "CRAFT_TEST_FAULTS"
"""Holds the faults to inject, as a JSON list."""


def read_faults() -> str | None:
    """Return the text of ``CRAFT_TEST_FAULTS``; None if there is none."""
    return os.environ.get(FAULTS) or None
