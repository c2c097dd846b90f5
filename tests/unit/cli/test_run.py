"""``--resume`` may come with a value or without, before the script; what comes after the script is the script's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from craft.cli import run as command
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

    def resolve(flags: dict[str, Any], config: Path | None, wishes: Wishes) -> None:
        seen.append(flags)
        raise SystemExit(0)

    monkeypatch.setattr(command, "resolve", resolve)
    CliRunner().invoke(command.run, arguments)
    (flags,) = seen
    assert (flags["resume"], flags["script"], flags["arguments"]) == (resume, script, rest)
