"""How a process ended that is another's child: from what the kernel keeps of it."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys

import pytest

from craft.agent.linux.syscalls import how_it_ended

KEPT = tuple(map(int, platform.release().split(".")[:2])) >= (6, 15)
"""Whether this kernel tells of a process that its parent has looked at."""


@pytest.mark.parametrize(
    ("code", "how"),
    [("raise SystemExit(3)", (3, None)), ("import os; os.kill(os.getpid(), 9)", (None, signal.SIGKILL))],
)
def test_an_exit_code_and_a_signal_can_be_told_before_and_after_the_parent_has_looked(
    code: str, how: tuple[int | None, int | None]
) -> None:
    process = subprocess.Popen([sys.executable, "-c", code])
    pidfd = os.pidfd_open(process.pid)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert how_it_ended(process.pid, pidfd) == how
    process.wait()
    assert how_it_ended(process.pid, pidfd) == (how if KEPT else (None, None))
    os.close(pidfd)


def test_of_one_that_lives_nothing_is_known() -> None:
    pidfd = os.pidfd_open(os.getpid())
    assert how_it_ended(os.getpid(), pidfd) == (None, None)
    os.close(pidfd)
