"""Asking a process for its stacks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from craft.agent.linux import procfs
from craft.agent.watchdog.stacks import MAX_BYTES, append_to_log, dump
from craft.wire.activity import STACKS_SIGNAL, read

from ..victims import Victim, until


def ready(victim: Victim) -> None:
    """It hangs, as far as it says so itself: it is in the phase in which it will."""
    until(lambda: (doing := read(victim.activity)) is not None and doing.step == 41)


@pytest.mark.parametrize("kind", ["sleep", "loop", "gil", "deadlock", "loader"])
def test_the_stack_of_whatever_hangs_names_where(tmp_path: Path, kind: str) -> None:
    with Victim(tmp_path / kind, kind) as victim:
        ready(victim)
        until(lambda: "hang_here" in asyncio.run(dump(victim.pid, victim.stacks)))

        text = asyncio.run(dump(victim.pid, victim.stacks))

        assert "beating" in text, "all threads are in it"
        assert len(text) <= MAX_BYTES
        assert victim.process.poll() is None, "asking does not end it"


def test_the_stack_of_a_data_loader_process_is_there_too(tmp_path: Path) -> None:
    with Victim(tmp_path / "loader", "loader") as victim:
        ready(victim)
        until(lambda: "hang_here" in asyncio.run(dump(victim.pid, victim.stacks)))
        (child,) = procfs.children(victim.pid)

        text = asyncio.run(dump(victim.pid, victim.stacks))

        own, _, its = text.partition(f"its child process {child}:\n")
        assert "<module>" in own and "hang_here" not in own
        assert "hang_here" in its


def test_of_two_dumps_the_second_has_only_itself(tmp_path: Path) -> None:
    with Victim(tmp_path / "sleep", "sleep") as victim:
        ready(victim)
        until(lambda: "hang_here" in asyncio.run(dump(victim.pid, victim.stacks)))

        assert asyncio.run(dump(victim.pid, victim.stacks)).count("hang_here") == 1


def test_a_stopped_process_is_not_asked(tmp_path: Path) -> None:
    with Victim(tmp_path / "sleep", "sleep") as victim:
        ready(victim)
        victim.stop()

        text = asyncio.run(dump(victim.pid, victim.stacks))

        assert text.startswith("no Python stack: the process is stopped by a signal\n")
        assert victim.stacks.read_text() == ""


def test_a_process_without_a_handler_is_not_ended_by_the_question(tmp_path: Path) -> None:
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        assert not procfs.catches(process.pid, STACKS_SIGNAL)

        text = asyncio.run(dump(process.pid, tmp_path / "stacks"))

        assert text.startswith("no Python stack: the process has no handler")
        assert process.poll() is None
        process.stdin.close()
        assert process.wait() == 0


def test_a_process_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()

    assert "the process is gone" in asyncio.run(dump(process.pid, tmp_path / "stacks"))


BLOCKED = """
import signal, sys, threading
from pathlib import Path
from craft.wire.activity import STACKS_SIGNAL
from craft.worker.report import stacks
stacks.register(Path(sys.argv[1]))
signal.pthread_sigmask(signal.SIG_BLOCK, [STACKS_SIGNAL])
print(flush=True)
sys.stdin.read()
"""


def test_no_answer_is_waited_for_no_longer_than_the_limit_and_the_loop_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    with subprocess.Popen(
        [sys.executable, "-c", BLOCKED, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()

        async def ask() -> tuple[str, int]:
            ticks, task = 0, asyncio.create_task(dump(process.pid, path, 1.0))
            while not task.done():
                ticks += 1
                await asyncio.sleep(0.01)
            return task.result(), ticks

        began = time.monotonic()
        text, ticks = asyncio.run(ask())

        assert text.startswith("no Python stack: no answer within 1 s")
        assert time.monotonic() - began < 20
        assert ticks > 5
        process.stdin.close()


DEEP = """
import sys
from pathlib import Path
from craft.worker.report import stacks
stacks.register(Path(sys.argv[1]))
import threading
def wait(): threading.Event().wait()
def a_function_with_a_rather_long_name_so_that_the_dump_gets_long(depth):
    if depth: a_function_with_a_rather_long_name_so_that_the_dump_gets_long(depth - 1)
    else: threading.Event().wait()
for _ in range(6):
    threading.Thread(target=a_function_with_a_rather_long_name_so_that_the_dump_gets_long, args=(80,), daemon=True).start()
print(flush=True)
def the_main_thread(): sys.stdin.read()
the_main_thread()
"""


def test_a_long_dump_keeps_its_end_where_the_main_thread_is(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    with subprocess.Popen(
        [sys.executable, "-c", DEEP, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        until(lambda: "the_main_thread" in asyncio.run(dump(process.pid, path)))

        text = asyncio.run(dump(process.pid, path))

        assert len(text.encode()) <= MAX_BYTES
        assert text.startswith("... (cut)\n  File ")
        assert "the_main_thread" in text
        process.stdin.close()


def test_a_dump_stands_in_the_log_under_a_heading(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("step 1\n")

    append_to_log(log, "w1 hangs: why", "File x")

    first, _, heading, *rest = log.read_text().splitlines()
    assert first == "step 1"
    assert heading.startswith("--- ") and heading.endswith(" craft: w1 hangs: why")
    assert rest == ["File x", "--- end of stacks"]
