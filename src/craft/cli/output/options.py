"""Options that several commands have, and types of their values."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)

run_option = click.option(
    "--dir", "run_dir", type=FOLDER, help="The run directory. Default: the newest craft-run* in the current directory."
)


class FiniteNumber(click.FloatRange):
    """A number with bounds that refuses ``nan`` and ``inf``, which click accepts."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return found


def json_option(text: str) -> Callable[[Any], Any]:
    """Return ``--json``, with its help."""
    return click.option("--json", "as_json", is_flag=True, help=text)


def reason_option(default: str = "asked by a person") -> Callable[[Any], Any]:
    """Return ``--reason``."""
    return click.option("--reason", default=default, show_default=True, help="For the journal.")


def technique_options(command: Any) -> Any:
    """Add ``--enable``, ``--disable`` and ``--set`` to a command."""
    for flag, name, metavar, text in (
        ("--set", "sets", "NAME.KEY=VALUE", "A setting of a technique."),
        ("--disable", "disable", "NAME", "Switch a technique off."),
        ("--enable", "enable", "NAME", "Switch a technique on; 'craft techniques' lists them."),
    ):
        command = click.option(flag, name, multiple=True, metavar=metavar, help=text)(command)
    return command
