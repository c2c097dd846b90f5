"""Techniques of other packages that are not as they should be: said with their class, and nobody else suffers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from craft.cli.techniques import techniques
from craft.protocol.errors import ConfigError
from craft.settings.run import resolve
from craft.settings.techniques import Wishes

SCRIPT = {"script": "json", "as_module": True}
TECHNIQUE = """
import msgspec
from typing import Annotated
from craft.techniques import ConfigError, Technique, says

class Made(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    level: Annotated[int, says("How much.")] = 1
    share: Annotated[float, says("Of all.")] = 0.5

class Odd(Technique[Made]):
    name = "odd"
    summary = "does what it is made to do"
    Settings = Made
"""
Install = Callable[..., str]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Install:
    """Install the technique ``odd`` with these lines in its class; returns the name of its module."""

    def installed(*lines: str) -> str:
        module = f"odd_{abs(hash(request.node.nodeid))}"
        body = "".join(f"    {line}\n" for line in lines)
        (tmp_path / f"{module}.py").write_text(TECHNIQUE + body)
        info = tmp_path / f"{module}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[craft.techniques]\nodd = {module}:Odd\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        return module

    return installed


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("before = ('odd',)", "before itself"),
        ("before = 'loss'", "before must be a tuple of names"),
        ("shared = ('levels',)", "shared: there is no 'levels'; there are level, share"),
        ("points = ('after_lunch',)", "points: there is no 'after_lunch'"),
        ("answers = ('WorkerLost',)", "answers must be a tuple of events"),
        ("summary = ''", "needs a summary"),
        ("Settings = dict", "derived from msgspec.Struct"),
        ("def __init__(self, settings): raise ValueError('no')", "cannot be made: ValueError: no"),
        ("def inexact(self): raise ValueError('no')", "inexact: ValueError: no"),
    ],
)
def test_one_that_is_broken_is_refused_where_it_is_named_and_listed_as_such(
    install: Install, line: str, part: str
) -> None:
    module = install(line)
    listed = CliRunner().invoke(techniques)
    assert listed.exit_code == 0 and "membership   on" in listed.stdout and part in listed.stderr
    assert f"technique odd ({module}:Odd)" in listed.stderr
    shown = CliRunner().invoke(techniques, ["odd"])
    assert shown.exit_code == 2 and part in shown.stderr
    with pytest.raises(ConfigError, match=rf"technique odd \({module}:Odd\)") as caught:
        resolve(SCRIPT, None, Wishes(enable=("odd",)))
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("@classmethod\n    def check(cls, settings): raise ValueError('no')", "check: ValueError: no"),
        ("def objection(self, others): raise ValueError('no')", "objection: ValueError: no"),
    ],
)
def test_what_it_raises_about_its_settings_is_said_with_its_class(install: Install, line: str, part: str) -> None:
    module = install(line)
    with pytest.raises(ConfigError, match=rf"technique odd \({module}:Odd\): {part}"):
        resolve(SCRIPT, None, Wishes(enable=("odd",)))
    assert CliRunner().invoke(techniques, ["odd"]).exit_code == 0


def test_what_it_refuses_has_file_and_line(install: Install, tmp_path: Path) -> None:
    install("@classmethod\n    def check(cls, settings): raise ConfigError('level=3: is too much: take 2')")
    path = tmp_path / "craft.toml"
    path.write_text("[techniques.odd]\nshare = 0.1\nlevel = 3")
    with pytest.raises(ConfigError, match=r"craft.toml, line 3: \[techniques.odd\] level = 3: is too much: take 2"):
        resolve(SCRIPT, path)
    with pytest.raises(ConfigError, match=r"^--set odd.level=3: is too much"):
        resolve(SCRIPT, None, Wishes(sets=("odd.level=3",)))


def test_a_number_that_is_none_is_refused_whatever_its_bounds(install: Install, tmp_path: Path) -> None:
    install()
    path = tmp_path / "craft.toml"
    path.write_text("[techniques.odd]\nshare = nan")
    with pytest.raises(ConfigError, match=r"line 2: \[techniques.odd\] share = nan: must be a number"):
        resolve(SCRIPT, path)


def test_names_outside_of_its_table_are_for_those_of_craft_alone(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("flags = {'on_loss': 'level', 'odd_level': 'level'}")
    monkeypatch.setenv("CRAFT_ON_LOSS", "shrink")
    resolved = resolve(SCRIPT, None, Wishes(enable=("odd",)))
    assert resolved.settings.on_loss == "shrink" and "odd.level" not in resolved.choice.origins
    assert "CRAFT_" not in CliRunner().invoke(techniques, ["odd"]).stdout


def test_it_is_in_the_schema_once_it_is_installed(install: Install) -> None:
    install("flags = {'odd_level': 'level'}")
    whole = json.loads(CliRunner().invoke(techniques, ["--schema"]).stdout)["properties"]
    assert whole["techniques"]["properties"]["odd"]["properties"]["level"]["description"] == "How much."
    assert "odd" in whole["techniques"]["properties"]["order"]["items"]["enum"]
    assert "odd_level" not in whole["run"]["properties"]


def test_a_limit_without_end_is_shown_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "craft.toml"
    path.write_text("[techniques.hang]\nlimit_s = inf")
    assert "limit_s = inf" in CliRunner().invoke(techniques, ["hang", "--config", str(path)]).stdout
    shown = json.loads(CliRunner().invoke(techniques, ["hang", "--json", "--config", str(path)]).stdout)
    assert next(each["value"] for each in shown[0]["settings"] if each["key"] == "limit_s") == "inf"
