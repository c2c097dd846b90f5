"""Which techniques a job has, and how they are set: craft.toml, variables, flags, and what is said about mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from craft.decide.techniques import BUILT_IN, Checkpoints, Hang, Loss, Membership, Preemption
from craft.protocol.errors import ConfigError
from craft.settings.document import Document
from craft.settings.run import read_effective, resolve, write_effective
from craft.settings.techniques import Choice, Wishes, alone, choose, from_json, given_by_flags, to_json

SCRIPT = {"script": "json", "as_module": True}


def written(folder: Path, text: str) -> Path:
    path = folder / "craft.toml"
    path.write_text(text)
    return path


def chosen(folder: Path, text: str, wishes: Wishes | None = None, **flags: object) -> Choice:
    return choose(Document(written(folder, text)), given_by_flags(flags), wishes or Wishes())


def test_all_built_in_techniques_are_on_unless_they_are_switched_off(tmp_path: Path) -> None:
    assert list(chosen(tmp_path, "").techniques.by_name) == [kind.name for kind in BUILT_IN]
    off = chosen(tmp_path, "[techniques.hang]\nenabled = false", Wishes(disable=("alerts",))).techniques
    assert off.get(Hang) is None and "alerts" not in off.by_name and off.get(Loss) is not None


def test_a_flag_comes_before_the_environment_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(
        tmp_path, '[run]\nworkers = 2\n[techniques.hang]\nlimit_s = 3.0\nfactor = 5\n[techniques.loss]\nanswer = "wait"'
    )
    monkeypatch.setenv("CRAFT_HANG_LIMIT_S", "4.5")
    monkeypatch.setenv("CRAFT_ON_LOSS", "shrink")
    resolved = resolve({**SCRIPT, "on_loss": "redo"}, path)
    assert resolved.settings.hang_limits.limit_s == 4.5 and resolved.settings.hang_limits.factor == 5.0
    assert resolved.settings.on_loss == "redo" and resolved.settings.workers == 2
    assert resolved.choice.origins["hang.factor"] == str(path)
    assert resolved.choice.origins["hang.limit_s"] == "environment"
    assert resolved.choice.origins["loss.answer"] == "flag"


def test_what_is_in_force_is_written_with_its_origin_and_read_back(tmp_path: Path) -> None:
    text = '[run]\non_loss = "wait"\n[techniques.checkpoints]\nurl = "store"\nkeep = 2\n[techniques.preemption]\nenabled = false'
    resolved = resolve({**SCRIPT, "spares": 1}, written(tmp_path, text), Wishes(sets=("hang.limit_s=7",)))
    effective = tmp_path / "config.toml"
    write_effective(effective, resolved)
    said = effective.read_text()
    assert f'answer = "wait"  # {tmp_path / "craft.toml"}' in said and "limit_s = 7.0  # flag" in said
    again = choose(Document(effective), {}).techniques
    assert to_json(again) == to_json(resolved.settings.techniques)
    assert again.get(Preemption) is None
    assert read_effective(effective)["checkpoints"] == "store" and read_effective(effective)["on_loss"] == "wait"


def test_settings_reach_a_worker_unchanged(tmp_path: Path) -> None:
    techniques = chosen(
        tmp_path, '[techniques.checkpoints]\nurl = "a b\\"c"\n[techniques.hang]\nenabled = false'
    ).techniques
    there = from_json(to_json(techniques))
    found = there.get(Checkpoints)
    assert found is not None and found.settings.url == 'a b"c' and there.get(Hang) is None
    assert there.shared() == techniques.shared()
    assert there.shared().items() >= {"loss.answer": "redo", "divergence.answer": "report"}.items()


def test_outside_of_a_job_variables_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert alone().get(Membership) is not None
    monkeypatch.setenv("CRAFT_CHECKPOINTS", "here")
    found = alone().get(Checkpoints)
    assert found is not None and found.settings.url == "here"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[run]\nworkers = 2\nspars = 1", ["line 3", "'spars'", "did you mean spares?"]),
        ("[techniques.hangs]\nlimit_s = 1", ["line 1", "'hangs'", "did you mean hang?"]),
        ("[techniques.hang]\n\nlimits = 1", ["line 3", "'limits'", "did you mean limit_s?"]),
        ("[techniques.hang]\nlimit_s = 'soon'", ["line 2", "[techniques.hang]", "limit_s"]),
        ("[techniques.loss]\nanswer = 'rdo'", ["line 2", "answer", "rdo"]),
        ("[techniques.loss]\nenabled = false", ["line 2", "cannot be switched off"]),
        ("[techniques.hang]\nenabled = 1", ["line 2", "true or false"]),
        ("[techniques]\nhang = 3", ["[techniques.hang] is a table"]),
        ("[techniques]\norder = 'hang'", ["line 2", "a list"]),
        ("[techniques.alerts]\nrules = 1", ["line 2", "'rules'"]),
        ("[run]\nworkers = 'many'", ["line 2", "[run]", "workers"]),
        ("[run]\nhang_limit_s = 1\n[techniques.hang]\nlimit_s = 2", ["line 4", "say it once"]),
        ("[techniques.checkpoints]\nkeep = 0", ["at least 1"]),
        ("[techniques.loss]\nanswer = 'wait'\n[techniques.restart]\nenabled = false", ["technique loss", "--spares"]),
        ("[technique.hang]\nlimit_s = 1", ["line 1", "'technique'", "did you mean techniques?"]),
        ("[run\nworkers = 1", ["line 1"]),
    ],
)
def test_what_is_wrong_is_named_with_file_line_key_and_the_nearest_one(
    tmp_path: Path, text: str, parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(SCRIPT, written(tmp_path, text))
    for part in parts:
        assert part in str(caught.value)
    if "technique loss" not in parts and "at least 1" not in parts:
        assert str(tmp_path / "craft.toml") in str(caught.value)


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ("hang", "NAME.KEY=VALUE"),
        ("hang.limit=3", "did you mean limit_s?"),
        ("hang.limit_s=x", "--set hang.limit_s=x"),
        ("heng.limit_s=3", "did you mean hang?"),
    ],
)
def test_a_flag_for_a_setting_that_there_is_not_is_refused(given: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part.replace("?", r"\?")):
        resolve(SCRIPT, None, Wishes(sets=(given,)))


def test_a_variable_of_the_wrong_kind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRAFT_HANG_LIMIT_S", "soon")
    with pytest.raises(ConfigError, match="CRAFT_HANG_LIMIT_S"):
        resolve(SCRIPT, None)
