"""Print output of commands. External text is made safe here, so that commands need not care."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import click

from craft.telemetry.text.plain_text import indented, one_line


def echo(text: str = "", *, err: bool = False) -> None:
    """Print one line for people; it may include empty lines before and after."""
    body = text.strip("\n")
    before = len(text) - len(text.lstrip("\n"))
    behind = len(text) - before - len(body)
    click.echo("\n" * before + one_line(body) + "\n" * behind, err=err)


def echo_error(text: str) -> None:
    """Print an error on standard error; it may have several lines."""
    click.echo(indented(text), err=True)


def echo_json(value: Any, indent: int | None = None) -> None:
    """Print a value for programs: the original text, with JSON's escapes."""
    click.echo(json.dumps(value, indent=indent))


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> Iterator[str]:
    """Yield a line for each row, with cells as wide as the widest of their column; ``right`` ones are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        line = (cell.rjust(width) if place in right else cell.ljust(width) for place, (cell, width) in enumerate(cells))
        yield "  ".join(line).rstrip()
