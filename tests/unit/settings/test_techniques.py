"""Which techniques a job has, and how they are set: craft.toml, variables, flags, and what is said about mistakes."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from craft.decide.techniques import BUILT_IN, Checkpoints, Hang, Loss, Membership, Preemption
from craft.protocol.errors import ConfigError
from craft.settings.files.toml_file import TomlFile
from craft.settings.run import for_lighthouse, read_effective, resolve, write_effective
from craft.settings.techniques import TechniqueChoice, Wishes, alone, choose, from_json, given_by_flags, to_json
from craft.settings.worker import WorkerSettings

SCRIPT = {"script": "json", "as_module": True}


def written(folder: Path, text: str) -> Path:
    path = folder / "craft.toml"
    path.write_text(text)
    return path


def chosen(folder: Path, text: str, wishes: Wishes | None = None, **flags: object) -> TechniqueChoice:
    return choose(TomlFile(written(folder, text)), given_by_flags(flags), wishes or Wishes())


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
    again = choose(TomlFile(effective), {}).techniques
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
        ("[techniques.hang]\nlimit_s = nan", ["line 2", "limit_s = nan"]),
        ("[run]\nfirst_step_limit_s = nan", ["line 2", "[run] first_step_limit_s = nan"]),
        ("[techniques.preemption]\nlimit_s = inf", ["line 2", "limit_s = inf", "must be at most"]),
        ("[techniques.hang]\nlimit_s = -1", ["line 2", "[techniques.hang] limit_s = -1", "at least 0"]),
        ("[techniques.hang]\nfactor = 0", ["line 2", "factor = 0", "more than 0"]),
        ("[techniques.hang]\nfirst_step_limit_s = -1", ["line 2", "first_step_limit_s", "at least 0"]),
        ("[techniques.hang]\nstop_limit_s = -1", ["line 2", "stop_limit_s", "at least 0"]),
        ("[techniques.preemption]\nlimit_s = -1", ["line 2", "limit_s", "at least 0"]),
        ("[techniques.loss]\nwait_limit_s = -1", ["line 2", "wait_limit_s", "at least 0"]),
        ("[techniques.restore]\nlimit_s = -1", ["line 2", "limit_s", "at least 0"]),
        ("[techniques.restore]\ntries = 0", ["line 2", "[techniques.restore] tries = 0", "at least 1"]),
        ("[techniques.spares]\ncount = -1", ["line 2", "count = -1", "at least 0"]),
        ("[run]\nmax_restarts = -1", ["line 2", "[run] max_restarts = -1", "at least 0"]),
        ("[run]\nbucket_mb = 0", ["line 2", "[run] bucket_mb = 0", "more than 0"]),
        ("[run]\nworkers = 0", ["line 2", "[run] workers = 0", "at least 1 worker"]),
        ("\ntechniques.hang.limits = 3", ["line 2", "'limits'", "did you mean limit_s?"]),
        ("[techniques]\n\nhang = { limits = 3 }", ["line 3", "'limits'", "did you mean limit_s?"]),
        ("[techniques]\n\nhang.limits = 3", ["line 3", "'limits'", "did you mean limit_s?"]),
        ("\nrun = 5", ["line 2", "[run] must be a table, not 5"]),
        ("[techniques.loss]\nanswer = 'rdo'", ["line 2", 'answer = "rdo"', "did you mean redo?"]),
        ("[run]\non_loss = 'never'", ["line 2", 'on_loss = "never"', "there are auto, redo, shrink, wait"]),
        ("[run]\ncheckpoint_every = 'often'", ["line 2", '[run] checkpoint_every = "often": say', "500 steps"]),
        ("[techniques.checkpoints]\nevery = 'often'", ["line 2", '[techniques.checkpoints] every = "often": say']),
        ("[techniques.checkpoints]\nurl = ''", ["line 2", '[techniques.checkpoints] url = "": say where']),
        ("[techniques.loss]\nenabled = false", ["line 2", "cannot be switched off"]),
        ("[techniques.hang]\nenabled = 1", ["line 2", "true or false"]),
        ("[techniques]\nhang = 3", ["line 2", "[techniques.hang] must be a table, not 3"]),
        ("[techniques]\norder = ['los']", ["line 2", "'los'", "did you mean loss?"]),
        ("[techniques]\norder = ['loss', 'loss']", ["line 2", "'loss' twice"]),
        ("[techniques]\norder = 'hang'", ["line 2", "a list"]),
        ("[techniques.alerts]\nrules = 1", ["line 2", "'rules'"]),
        ("[run]\nworkers = 'many'", ["line 2", "[run]", "workers"]),
        ("[run]\nhang_limit_s = 1\n[techniques.hang]\nlimit_s = 2", ["line 4", "say it once"]),
        ("[techniques.checkpoints]\nkeep = 0", ["line 2", "[techniques.checkpoints] keep = 0", "at least 1"]),
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
    if "technique loss" not in parts:
        assert str(tmp_path / "craft.toml") in str(caught.value)


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ("hang", "NAME.KEY=VALUE"),
        ("hang.limit=3", "did you mean limit_s?"),
        ("hang.limit_s=x", "--set hang.limit_s=x"),
        ("heng.limit_s=3", "--set heng.limit_s=3: there is no technique 'heng'; did you mean hang?"),
        ("hang.limit_s=-3", "--set hang.limit_s=-3: must be at least 0"),
        ("hang.limit_s=nan", "--set hang.limit_s=nan: must be at least 0"),
        ("loss.answer=waitt", "--set loss.answer=waitt: Invalid enum value 'waitt'; did you mean wait?"),
        ("checkpoints.every=often", "--set checkpoints.every=often: say 'auto'"),
        ("alerts.x=1", "--set alerts.x=1: alerts has no settings"),
        ("membership.x=1", "--set membership.x=1: membership has no settings"),
        ("hang.enabled=false", "--disable hang"),
    ],
)
def test_a_flag_for_a_setting_that_there_is_not_is_refused(given: str, part: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(part)):
        resolve(SCRIPT, None, Wishes(sets=(given,)))


@pytest.mark.parametrize(
    ("wishes", "both"),
    [
        (Wishes(enable=("hang",), disable=("hang",)), ("--enable hang", "--disable hang")),
        (Wishes(disable=("hang",), sets=("hang.limit_s=3",)), ("--set hang.limit_s=3", "--disable hang")),
    ],
)
def test_a_technique_is_not_switched_on_and_off_at_once(wishes: Wishes, both: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"{both[0]} and {both[1]} contradict each other"):
        resolve(SCRIPT, None, wishes)


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("CRAFT_HANG_LIMIT_S", "soon", "Expected `float`"),
        ("CRAFT_HANG_LIMIT_S", "-1", "must be at least 0"),
        ("CRAFT_ON_LOSS", "waitt", "did you mean wait?"),
        ("CRAFT_WORKERS", "abc", "Expected `int`"),
        ("CRAFT_WORKERS", "0", "a job needs at least 1 worker"),
        ("CRAFT_CHECKPOINT_KEEP", "0", "must be at least 1"),
        ("CRAFT_CHECKPOINT_EVERY", "often", "say 'auto'"),
    ],
)
def test_a_variable_with_a_wrong_value_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, part: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=re.escape(f"{name}={value}: ") + ".*" + re.escape(part)):
        resolve(SCRIPT, None)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"spares": -1}, "--spares -1: must be at least 0"),
        ({"checkpoint_keep": 0}, "--checkpoint-keep 0: must be at least 1"),
        ({"checkpoint_every": "often"}, "--checkpoint-every often: say 'auto'"),
        ({"threads": 0}, "--threads 0: a worker needs at least 1 thread"),
        ({"workers": 2, "min_workers": 3}, "--min-workers 3: must be between 1 and --workers 2"),
    ],
)
def test_a_flag_with_a_wrong_value_is_named(tmp_path: Path, flags: dict[str, object], said: str) -> None:
    path = written(tmp_path, "[techniques.checkpoints]\nkeep = 2\nevery = 'auto'")
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        resolve({**SCRIPT, **flags}, path)


def test_what_the_file_has_is_looked_at_though_a_flag_says_otherwise(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 2: .*limit_s = -1"):
        resolve(SCRIPT, written(tmp_path, "[techniques.hang]\nlimit_s = -1"), Wishes(sets=("hang.limit_s=3",)))


def test_a_worker_without_a_job_is_told_which_variable_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRAFT_BUCKET_MB", "x")
    with pytest.raises(ConfigError, match="CRAFT_BUCKET_MB=x: Expected `float`"):
        WorkerSettings.from_environment()


def test_a_limit_without_end_reaches_the_run_directory_and_the_workers(tmp_path: Path) -> None:
    path = written(tmp_path, "[techniques.hang]\nlimit_s = inf")
    resolved = resolve(SCRIPT, path, Wishes(sets=("hang.stop_limit_s=inf",)))
    effective = tmp_path / "config.toml"
    write_effective(effective, resolved)
    for techniques in (
        choose(TomlFile(effective), {}).techniques,
        from_json(to_json(resolved.settings.techniques)),
    ):
        hang = techniques.get(Hang)
        assert hang is not None and (hang.settings.limit_s, hang.settings.stop_limit_s) == (math.inf, math.inf)


def test_a_lighthouse_of_its_own_reads_settings_from_the_same_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "[run]\non_loss = 'shrink'\nwait_limit_s = 7")
    monkeypatch.setenv("CRAFT_ON_LOSS", "wait")

    def loss(*, effective: bool, **flags: object) -> tuple[str, float]:
        found = for_lighthouse(flags, path, Wishes(), effective=effective).get(Loss)
        assert found is not None
        return found.settings.answer, found.settings.wait_limit_s

    assert loss(effective=False) == ("wait", 7.0)
    # What 'craft run' wrote down is in force, whatever the environment of the lighthouse that it starts says.
    assert loss(effective=True) == ("shrink", 7.0)
    assert loss(effective=False, on_loss="redo") == ("redo", 7.0)
    with pytest.raises(ConfigError, match="did you mean on_loss"):
        for_lighthouse({}, written(tmp_path, "[run]\non_los = 'wait'"), Wishes(), effective=False)
