"""Versions of the packages that adapters are for, by their first two numbers."""

from __future__ import annotations

Number = tuple[int, int]


def is_between(version: str, oldest: Number, following: Number) -> bool:
    """Whether a version is ``oldest`` or newer, and before ``following``; what has no numbers is not."""
    try:
        number = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return False
    return oldest <= number < following


def dotted(number: Number) -> str:
    """As people write it: ``2.4``."""
    return ".".join(map(str, number))
