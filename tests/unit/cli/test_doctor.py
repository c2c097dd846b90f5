"""``craft doctor`` on this machine: it measures, it really aborts a Gloo group, and its exit code says what it found."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from craft.cli.main import main


def craft(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["doctor", *map(str, args)], prog_name="craft")


def test_it_finds_a_token_that_others_can_read_and_little_else(tmp_path: Path) -> None:
    token = tmp_path / "craft-run" / "token"
    token.parent.mkdir()
    token.write_text("secret")
    token.chmod(0o644)

    done = craft("--dir", tmp_path, "--json", "--params", "1e6", "--workers", "2", "--microbatches", "8")

    findings = {finding["subject"]: finding for finding in json.loads(done.output)}
    assert done.exit_code == 1, done.output
    assert [subject for subject, each in findings.items() if each["grade"] == "problem"] == ["token"], done.output
    assert findings["token"]["advice"].startswith(f"chmod 600 {token}")
    assert "secret" not in done.output
    assert "ms after the abort" in findings["Gloo"]["found"]
    assert {
        "Python",
        "torch",
        "CPUs",
        "shared memory",
        "files",
        "ports",
        "loopback",
        "disk",
        "clock",
    } <= findings.keys()
    assert "1e+06 parameters" in findings["held gradients"]["found"]


def test_what_it_cannot_understand_is_bad_input(tmp_path: Path) -> None:
    for wrong in (("--dtype", "int3"), ("--params", "-1")):
        done = craft("--dir", tmp_path, "--params", "1e6", *wrong)
        assert done.exit_code == 2, done.output
