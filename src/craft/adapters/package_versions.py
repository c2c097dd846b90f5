"""Compare versions of adapted packages by their first two numbers."""

from __future__ import annotations

Number = tuple[int, int]


def is_between(version: str, oldest: Number, following: Number) -> bool:
    """Return whether a version is at least ``oldest`` and before ``following``; False for one without numbers."""
    try:
        number = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return False
    return oldest <= number < following


def dotted(number: Number) -> str:
    """Return a version such as ``2.4``."""
    return ".".join(map(str, number))
