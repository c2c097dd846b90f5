"""What the page about running jobs says of the commands is complete."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from craft.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "run_a_job.md").read_text()


def commands() -> dict[str, click.Command]:
    context = click.Context(main)
    found = {name: main.get_command(context, name) for name in main.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


def test_every_command_is_in_the_table() -> None:
    assert not [name for name in commands() if f"| `craft {name}" not in PAGE]


@pytest.mark.parametrize("name", ["run", "lighthouse"])
def test_every_option_is_in_a_table(name: str) -> None:
    options = [each for each in commands()[name].params if isinstance(each, click.Option) and not each.hidden]
    names = {max(each.opts, key=len) for each in options} - {"--help"}
    assert names, "there are options"
    assert not sorted(each for each in names if f"`{each}" not in PAGE)
