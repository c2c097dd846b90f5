"""Align rows of text in columns."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> Iterator[str]:
    """Yield a line for each row, with cells as wide as the widest of their column; ``right`` ones are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        line = (cell.rjust(width) if place in right else cell.ljust(width) for place, (cell, width) in enumerate(cells))
        yield "  ".join(line).rstrip()
