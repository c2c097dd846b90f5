"""``craft run`` takes its options up to the script, and refuses what is not built yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from craft.cli import run as command
from craft.protocol.errors import ConfigError
from craft.settings.run import resolve
from craft.settings.techniques import Wishes


@pytest.mark.parametrize(
    ("arguments", "resume", "script", "rest"),
    [
        (["--resume", "train.py"], "auto", "train.py", ()),
        (["--resume", "12", "train.py"], "12", "train.py", ()),
        (["--workers", "2", "--resume", "auto", "train.py"], "auto", "train.py", ()),
        (["--resume", "-m", "train", "--lr", "1"], "auto", "train", ("--lr", "1")),
        (["--chaos", "--workers=3", "train.py", "--resume", "best"], None, "train.py", ("--resume", "best")),
        (["--checkpoints", "--resume", "train.py"], None, "train.py", ()),
    ],
)
def test_where_it_ends_and_the_script_begins(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    resume: str | None,
    script: str,
    rest: tuple[str, ...],
) -> None:
    seen: list[dict[str, Any]] = []

    def resolved(flags: dict[str, Any], config: Path | None, wishes: Wishes) -> None:
        seen.append(flags)
        raise SystemExit(0)

    monkeypatch.setattr(command, "resolve", resolved)
    CliRunner().invoke(command.run, arguments)
    (flags,) = seen
    assert (flags["resume"], flags["script"], flags["arguments"]) == (resume, script, rest)


@pytest.mark.parametrize("origin", ["flag", "environment", "file"])
def test_workers_that_are_not_whole_replicas_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, origin: str
) -> None:
    monkeypatch.chdir(tmp_path)
    script, config = tmp_path / "train.py", tmp_path / "craft.toml"
    script.write_text("")
    config.write_text("[run]\nworkers_per_replica = 2\n")
    options = {"flag": ["--workers-per-replica", "2"], "environment": [], "file": ["--config", str(config)]}[origin]
    if origin == "environment":
        monkeypatch.setenv("CRAFT_WORKERS_PER_REPLICA", "2")
    named = {"flag": "--workers-per-replica", "environment": "CRAFT_WORKERS_PER_REPLICA", "file": "workers_per_replica"}

    result = CliRunner().invoke(command.run, ["--workers", "5", *options, str(script)])

    assert result.exit_code == 2
    assert named[origin] in result.output
    assert "5 workers are not whole replicas of 2: give --workers 4 or 6" in result.output
    assert not list(tmp_path.glob("craft-run*")), "nothing was begun"


def test_several_workers_per_replica_are_taken_from_every_origin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script, config = tmp_path / "train.py", tmp_path / "craft.toml"
    script.write_text("")
    config.write_text("[run]\nworkers = 4\nworkers_per_replica = 4\n")
    given = {"script": str(script), "arguments": (), "as_module": False}

    assert resolve(given, config).settings.workers_per_replica == 4
    monkeypatch.setenv("CRAFT_WORKERS_PER_REPLICA", "2")
    assert resolve(given, config).settings.workers_per_replica == 2
    assert resolve({**given, "workers_per_replica": 1}, config).settings.workers_per_replica == 1


def test_a_host_of_several_may_hold_a_part_of_a_replica(tmp_path: Path) -> None:
    script, token = tmp_path / "train.py", tmp_path / "token"
    script.write_text("")
    token.write_text("x")
    given = {"script": str(script), "arguments": (), "as_module": False, "workers": 1, "workers_per_replica": 2}

    given |= {"lighthouse": "http://h1:29400", "token_file": str(token)}

    assert resolve(given, None).settings.workers_per_replica == 2


def test_one_worker_per_replica_is_what_every_job_has(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")

    given = {"script": str(script), "arguments": (), "as_module": False, "workers_per_replica": 1}

    assert resolve(given, None).settings.workers_per_replica == 1
    with pytest.raises(ConfigError, match="a replica has at least 1 worker"):
        resolve({**given, "workers_per_replica": 0}, None)
