"""A lighthouse that is kept: its serving process is killed for real, and the next one answers within moments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from craft.protocol.errors import Unreachable
from craft.settings.rundir import RunDir
from craft.telemetry.records.journal import read_lines
from craft.wire.client import Client

from .jobs import wait_for

COMMAND = "import sys; from craft.cli.lighthouse import lighthouse; sys.exit(lighthouse())"
LIMIT_S = 20.0


class Kept:
    """A keeper and the lighthouse that it keeps."""

    def __init__(self, run: RunDir, *options: str) -> None:
        self.run = run
        command = [sys.executable, "-c", COMMAND, "--workers", "1", "--dir", str(run.path), "--keep", *options]
        self.keeper = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def listening(self) -> Kept:
        assert self.keeper.stdout is not None
        line = self.keeper.stdout.readline()
        assert line.startswith("lighthouse listening on http://127.0.0.1:"), self.keeper.communicate()
        return self

    @property
    def serving(self) -> int:
        """The process id of whoever answers now."""
        return int(Client.of_run(self.run).get_status()["lighthouse"]["pid"])

    def next_after(self, pid: int) -> int:
        """Wait until another process than ``pid`` answers."""

        def other() -> int | None:
            try:
                return found if (found := self.serving) != pid else None
            except Unreachable:
                return None

        return wait_for(other, "another process serves", LIMIT_S)

    def end(self) -> tuple[str, str]:
        if self.keeper.poll() is None:
            self.keeper.kill()
        return self.keeper.communicate()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


@pytest.fixture
def kept(run: RunDir) -> Iterator[Kept]:
    kept = Kept(run).listening()
    yield kept
    kept.end()


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_killed_lighthouse_is_followed_by_another_one_at_the_same_address(kept: Kept) -> None:
    address, first = kept.run.read_address(), kept.serving
    assert first != kept.keeper.pid
    os.kill(first, signal.SIGKILL)
    began = time.perf_counter()
    second = kept.next_after(first)
    assert time.perf_counter() - began < 10.0
    assert kept.run.read_address() == address
    assert int(kept.run.lock.read_text()) == second
    os.kill(kept.keeper.pid, signal.SIGTERM)
    assert kept.keeper.wait(LIMIT_S) == 0
    out, err = kept.end()
    # The first line was read by the fixture; the second child said nothing.
    assert (out, "Traceback" in err) == ("", False)
    started = [line for line in read_lines(kept.run.journal) if line.get("event") == "LighthouseStarted"]
    assert [line["pid"] for line in started] == [first, second]


def test_one_that_keeps_dying_is_started_less_and_less_often(kept: Kept) -> None:
    ends = []
    pid = kept.serving
    for _ in range(4):
        os.kill(pid, signal.SIGKILL)
        began = time.perf_counter()
        pid = kept.next_after(pid)
        ends.append(time.perf_counter() - began)
    assert ends[3] > 0.3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_keeper_ends_both_cleanly(kept: Kept, number: signal.Signals) -> None:
    child = kept.serving
    kept.keeper.send_signal(number)
    assert kept.keeper.wait(LIMIT_S) == 0
    assert kept.end() == ("", "")
    assert gone(child)


def test_a_lighthouse_that_is_asked_to_end_takes_its_keeper_along(kept: Kept) -> None:
    os.kill(kept.serving, signal.SIGTERM)
    assert kept.keeper.wait(LIMIT_S) == 0


def test_a_killed_keeper_takes_the_lighthouse_along_and_its_lock(kept: Kept) -> None:
    child = kept.serving
    kept.keeper.kill()
    kept.keeper.wait()
    wait_for(lambda: gone(child), "the child dies with its keeper", LIMIT_S)
    again = Kept(kept.run).listening()
    assert again.serving != child
    again.end()


def test_bad_input_ends_the_keeper_with_its_sentence(kept: Kept) -> None:
    second = Kept(kept.run)
    out, err = second.keeper.communicate(timeout=LIMIT_S)
    assert (second.keeper.returncode, out) == (2, "")
    assert f"has a living lighthouse already (pid {kept.serving})" in err


def test_a_lighthouse_that_never_comes_to_serve_is_not_tried_for_ever(run: RunDir) -> None:
    run.create()
    run.journal.mkdir()
    kept = Kept(run)
    out, err = kept.keeper.communicate(timeout=LIMIT_S)
    assert (kept.keeper.returncode, out) == (1, "")
    assert "journal.jsonl" in err


def test_a_keeper_ends_with_its_parent(run: RunDir) -> None:
    nested = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {COMMAND!r}, *sys.argv[1:]]).wait()"
    options = ("--workers", "1", "--dir", str(run.path), "--keep", "--with-parent")
    parent = subprocess.Popen([sys.executable, "-c", nested, *options], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline().startswith("lighthouse listening")
    parent.kill()
    # Keeper and child have it open; it closes when the last of them ends.
    assert parent.stdout.read() == ""
    parent.communicate()


def test_a_lighthouse_that_is_stopped_by_a_signal_is_followed_by_another_one(kept: Kept) -> None:
    first = kept.serving
    os.kill(first, signal.SIGSTOP)
    # Its backlog takes connections: whoever asks is answered by the next one.
    wait_for(lambda: gone(first), "it is killed", LIMIT_S)
    assert kept.next_after(first) != first
