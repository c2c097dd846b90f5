"""Print output of commands. External text is made safe here, so that commands need not care."""

from __future__ import annotations

import json
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
