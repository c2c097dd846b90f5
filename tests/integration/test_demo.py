"""The demonstration: the first thing that anybody runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

from .jobs import CRAFT, LIMIT_S


def test_workers_are_killed_and_the_weights_are_the_same_P1(tmp_path: Path) -> None:
    command = [*CRAFT, "demo", "--workers", "2", "--kills", "1", "--steps", "40", "--seed", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Bit-identical." in done.stdout and "killed by SIGKILL" in done.stdout
