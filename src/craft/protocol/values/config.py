"""Describe settings where they are defined."""

from __future__ import annotations

import msgspec


def says(text: str) -> msgspec.Meta:
    """Describe a setting: ``limit_s: Annotated[float, says("No phase is overdue before this.")] = 10.0``."""
    return msgspec.Meta(description=text)
