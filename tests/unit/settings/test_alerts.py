"""Rules for alerts in craft.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from craft.decide.job.alerts import AlertRule, AlertSettings, AlertTarget, Hook
from craft.protocol.errors import ConfigError
from craft.settings.alerts import read_alerts, write_alerts
from craft.settings.files.toml_file import TomlFile

GOOD = """
[run]
workers = 2

[[alerts]]
match = { alertname = "GpuXidErrors", severity = "~critical|page" }
answer = "drain"
target = { host = "Hostname", gpu = "gpu" }
deadline_s = 30.0

[[alerts]]
match = { alertname = "~Node.*" }
answer = "fail"
target = "node"

[hooks.pager]
host = "node.name"
value = "node.state"
answers = { down = "fail", "~up|ok" = "resolved" }
"""


def test_rules_are_read_and_can_be_written_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "craft.toml"
    path.write_text(GOOD)
    settings = read_alerts(TomlFile(path))
    assert settings.rules[0].target == AlertTarget(host="Hostname", gpu="gpu")
    assert settings.rules[1] == AlertRule(match={"alertname": "~Node.*"}, answer="fail", target="node")
    assert settings.hooks["pager"].meaning("up") == "resolved"
    assert settings.hooks["pager"].meaning("odd") == "report"
    again = tmp_path / "again.toml"
    again.write_text("[run]\n" + write_alerts(settings))
    assert read_alerts(TomlFile(again)) == settings
    assert read_alerts(TomlFile(None)) == AlertSettings()
    assert write_alerts(AlertSettings()) == ""


def test_odd_characters_survive_being_written(tmp_path: Path) -> None:
    odd = 'a"b\\c\n\té😀'
    settings = AlertSettings(
        rules=(AlertRule(match={odd: odd}, target=odd),), hooks={"h": Hook(value="v", answers={odd: "fail"})}
    )
    path = tmp_path / "craft.toml"
    path.write_text(write_alerts(settings))
    assert read_alerts(TomlFile(path)) == settings


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[[alerts]]\nanswr = 'drain'", ["line 2", "number 1", "'answr'", "did you mean answer?"]),
        ("[[alerts]]\n[[alerts]]\nanswer = 'drian'", ["line 3", "number 2", "$.answer", "did you mean drain?"]),
        ("[[alert]]", ["'alert'", "did you mean alerts?"]),
        ("[alerts]\nanswer = 'drain'", ["[[alerts]]"]),
        ("[[alerts]]\nmatch = { a = '~(' }", ["match.a", "regular expression", "missing )"]),
        ("[[alerts]]\nmatch = { a = '~(?=a)b' }", ["line 2", "match.a", "RE2", "invalid perl operator: (?="]),
        ("[[alerts]]\nmatch = { a = '~(a)\\1' }", ["match.a", "RE2", "invalid escape sequence"]),
        ("[hooks.x]\nvalue = 'v'\nanswers = { '~a++' = 'fail' }", ["[hooks.x]", "answers.~a++", "RE2"]),
        ("[[alerts]]\nmatch = { a = 1 }", ["$.match"]),
        ("[[alerts]]\ntarget = { hots = 'x' }", ["'hots'", "did you mean host?"]),
        ("[[alerts]]\ntarget = { gpu = 'x' }", ["target.gpu needs target.host"]),
        ("[[alerts]]\ndeadline_s = -1.0", ["deadline_s"]),
        ("[hooks.x]\nvalue = 'v'\nanswers = { a = 'fial' }", ["[hooks.x]", "answers.a", "did you mean fail?"]),
        ("[hooks.x]\nanswers = { a = 'fail' }", ["answers needs value"]),
        ("[hooks.x]\ngpu = 'g'", ["gpu needs host"]),
        ("[hooks.'a/b']", ["part of its URL"]),
        ("hooks = 3", ["[hooks.NAME]"]),
        ("[[alerts]]\nanswer = \nmatch = 1", ["line 2"]),
    ],
)
def test_what_is_wrong_is_named_with_its_file_and_the_nearest_key(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = tmp_path / "craft.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_alerts(TomlFile(path))
    for part in [str(path), *parts]:
        assert part in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml"):
        TomlFile(tmp_path / "gone.toml")


WITHOUT = """
import sys
from pathlib import Path
sys.modules["re2"] = None
from craft.protocol.errors import ConfigError
from craft.settings.alerts import read_alerts
from craft.settings.files.toml_file import TomlFile
try:
    print(read_alerts(TomlFile(Path(sys.argv[1]))).rules[0].match["a"])
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(("wanted", "said"), [("plain", "plain"), ("~p.*", "pip install google-re2")])
def test_without_re2_only_rules_with_regular_expressions_are_refused(tmp_path: Path, wanted: str, said: str) -> None:
    path = tmp_path / "craft.toml"
    path.write_text(f"[[alerts]]\nmatch = {{ a = '{wanted}' }}")
    command = [sys.executable, "-c", WITHOUT, str(path)]
    assert said in subprocess.run(command, capture_output=True, text=True, check=True).stdout
