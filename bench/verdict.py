"""What a benchmark comes to: rows of figures, and bars that hold or do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """One bar: what was measured, in words, and whether it holds."""

    what: str
    measured: str
    bar: str
    passed: bool

    def __str__(self) -> str:
        return f"{'PASS' if self.passed else 'FAIL'}  {self.what}: {self.measured} (bar: {self.bar})"


@dataclass(frozen=True)
class Summary:
    """A benchmark's result, ready to be shown."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    checks: tuple[Check, ...]
    figures: dict[str, Any]
    """The figures behind the rows, for the chart and the JSON file."""
