"""Whatever a command prints goes through ``cli/output/echo.py`` or the display, where text from outside is made safe."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import click
import pytest

import craft.cli
from craft.cli.output.echo import echo, echo_error, echo_json

FORGED = "evil\ncraft: all is well\x1b[2J"
FILES = sorted(Path(craft.cli.__path__[0]).glob("*.py"))


def _calls(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    return [ast.unparse(each.func) for each in ast.walk(tree) if isinstance(each, ast.Call)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_command_prints_by_itself(path: Path) -> None:
    own = {"click.echo", "click.secho", "print", "sys.stdout.write", "sys.stderr.write"}
    assert path.name == "echo.py" or not own & set(_calls(path))


def test_a_line_stays_one_line_and_json_keeps_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    echo(f"\nreason: {FORGED}\n")
    assert capsys.readouterr().out == "\nreason: evil\\ncraft: all is well\\x1b[2J\n\n"
    echo_error(FORGED)
    assert capsys.readouterr().err == "evil\n  craft: all is well\\x1b[2J\n"
    echo_json({"reason": FORGED})
    out = capsys.readouterr().out
    assert json.loads(out) == {"reason": FORGED}
    assert "\x1b" not in out
    assert click.unstyle(out) == out
