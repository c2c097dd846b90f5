"""The kernel's view of real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from craft.agent.linux import procfs
from craft.agent.linux.procfs import ProcessFiles

from ..victims import until

NAMED = """
import sys, threading
open("/proc/self/comm", "w").write("a) Z (b")
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(flush=True)
while sys.stdin.readline():
    for _ in range(3_000_000):
        pass
    print(flush=True)
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Burns some CPU for every line that it gets; its name is made to be misread."""
    with subprocess.Popen([sys.executable, "-c", NAMED], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_glance_shows_state_threads_and_cpu_whatever_the_name(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None
    files = ProcessFiles(process.pid)
    until(lambda: (glance := files.glance()) is not None and glance.state == "S")
    before = files.glance()

    process.stdin.write(b"\n")
    process.stdin.flush()
    process.stdout.readline()
    after = files.glance()

    assert before is not None and after is not None
    assert after.num_threads == 2
    assert after.main_cpu_s > before.main_cpu_s
    assert after.cpu_s >= after.main_cpu_s
    files.close()


def test_files_of_a_process_that_is_gone_show_nothing(process: subprocess.Popen[bytes]) -> None:
    files = ProcessFiles(process.pid)
    process.kill()
    process.wait()

    assert files.glance() is None
    files.close()
    with pytest.raises(OSError, match="No such"):
        ProcessFiles(process.pid)


def test_of_a_process_that_is_gone_there_is_nothing_to_say(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()

    assert procfs.state(process.pid) == procfs.wchan(process.pid) == procfs.kernel_text(process.pid) == ""
    assert procfs.children(process.pid) == []
    assert not procfs.catches(process.pid, 10)
    assert not procfs.is_traced(process.pid)


def test_children_are_found(process: subprocess.Popen[bytes]) -> None:
    assert process.pid in procfs.children(os.getpid())
