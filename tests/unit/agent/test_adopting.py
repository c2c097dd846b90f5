"""How a process ended that is another's child: from what the kernel keeps until its parent has looked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from craft.agent.adopting import _how


def ended(code: str) -> int:
    """The id of a process that has ended, and that nobody has waited for."""
    process = subprocess.Popen([sys.executable, "-c", code])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    _processes.append(process)
    return process.pid


_processes: list[subprocess.Popen[bytes]] = []


def test_an_exit_code_and_a_signal_can_be_told_apart() -> None:
    assert _how(ended("raise SystemExit(3)")) == (3, None)
    assert _how(ended(f"import os; os.kill(os.getpid(), {signal.SIGKILL})")) == (None, signal.SIGKILL)
    for process in _processes:
        process.wait()


def test_of_one_that_is_gone_or_lives_nothing_is_known() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert _how(process.pid) == (None, None)
    assert _how(os.getpid()) == (None, None)
