"""What torchft's lighthouses print stays out of pytest's output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SLOW_REPORTS = """
import time

def pytest_runtest_logreport(report):
    # Nothing is captured at this moment: a lighthouse that runs now prints to the terminal.
    time.sleep(0.1)
"""


def test_no_lighthouse_prints_between_the_phases_of_a_test(tmp_path: Path) -> None:
    (tmp_path / "slow_reports.py").write_text(SLOW_REPORTS)
    tests = Path(__file__).with_name("test_lighthouse.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "slow_reports", "-p", "no:cacheprovider", str(tests)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torchft::" not in done.stdout + done.stderr
