"""The switch with which tests make system calls of production processes fail."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.system_calls import Rule, Switch, each_failure, failing, kind_of_process


def test_a_call_fails_for_paths_that_match_and_so_many_times(tmp_path: Path) -> None:
    with failing(tmp_path / "switch", Rule("write", "ENOSPC", path="*/a", times=2)) as switch:
        outcomes = []
        for name in ("a", "b", "a", "a"):
            try:
                (tmp_path / name).write_bytes(b"text")
                outcomes.append(0)
            except OSError as error:
                outcomes.append(error.errno or -1)
        assert outcomes == [errno.ENOSPC, 0, errno.ENOSPC, 0]
        assert [Path(each["path"]).name for each in switch.struck("write")] == ["a", "a"]
    (tmp_path / "a").write_bytes(b"text")


def test_rules_change_while_a_process_runs(tmp_path: Path) -> None:
    with failing(tmp_path / "switch") as switch:
        os.close(os.open(tmp_path, os.O_RDONLY))
        switch.set(Rule("open", "EMFILE", path=str(tmp_path)))
        with pytest.raises(OSError, match="Too many open files"):
            os.open(tmp_path, os.O_RDONLY)
        switch.set()
        os.close(os.open(tmp_path, os.O_RDONLY))


def test_each_failure_of_some_work_fails_once_in_its_turn(tmp_path: Path) -> None:
    def work() -> None:
        with open(tmp_path / "file", "wb", buffering=0) as file:
            file.write(b"a")
            os.fsync(file.fileno())

    raised = list(each_failure(tmp_path / "switch", work, "EIO", path="*/file"))
    assert [type(each) for each in raised] == [OSError] * 3
    assert [each["call"] for each in Switch(tmp_path / "switch").struck()] == ["open", "write", "fsync"]


def test_a_seed_fixes_which_calls_fail_by_chance(tmp_path: Path) -> None:
    def outcomes(seed: int) -> list[bool]:
        found = []
        with failing(tmp_path / "switch", Rule("fsync", "EIO", probability=0.5, seed=seed)):
            fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
            for _ in range(32):
                try:
                    os.fsync(fd)
                    found.append(True)
                except OSError:
                    found.append(False)
            os.close(fd)
        return found

    assert outcomes(1) == outcomes(1) != outcomes(2)
    assert 4 < sum(outcomes(1)) < 28


def test_a_write_is_short_and_a_read_fails_and_a_call_takes_long(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with failing(tmp_path / "switch", Rule("write", short=True)) as switch:
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        assert os.write(fd, b"abcdef") == 3
        switch.set(Rule("fsync", delay_s=0.05))
        began = time.monotonic()
        os.fsync(fd)
        assert time.monotonic() - began >= 0.05
        switch.set(Rule("read", "EIO", path=str(path)))
        for read in (lambda: os.pread(fd, 1, 0), path.read_bytes, path.read_text):
            with pytest.raises(OSError, match="Input/output error"):
                read()
        os.close(fd)


@pytest.mark.parametrize("call", ["accept", "connect", "socket", "fork"])
def test_calls_without_a_path_fail(tmp_path: Path, call: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        calls: dict[str, Callable[[], object]] = {
            "accept": lambda: server.accept(),
            "connect": lambda: client.connect(server.getsockname()),
            "socket": lambda: socket.socket(),
            "fork": lambda: subprocess.run(["true"], check=False),
        }
        with failing(tmp_path / "switch", Rule(call, "ENOMEM")), pytest.raises(OSError, match="allocate memory"):
            calls[call]()


def test_a_rule_holds_in_processes_of_its_kind_and_what_they_fork(tmp_path: Path) -> None:
    switch = Switch(tmp_path / "switch")
    switch.set(Rule("rename", "EIO", process="worker"))
    script = "import os; open('a', 'w').close(); os.rename('a', 'b'); os.fork() and os.wait() or os.rename('b', 'c')"
    # A fork server is known by its command line, and its forks are workers.
    command = [sys.executable, "-c", script, "craft.agent.linux.forkserver"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **switch.environment()}, capture_output=True, text=True, check=False
    )
    assert "Input/output error" in done.stderr and (tmp_path / "b").exists()
    assert [each["process"] for each in switch.struck()] == ["worker"]


def test_processes_are_known_by_their_command_lines() -> None:
    assert kind_of_process(["python", "-m", "craft.cli.main", "run", "--workers", "2", "train.py"]) == "agent"
    assert kind_of_process(["python", "-m", "craft.cli.main", "lighthouse", "--keep"]) == "keeper"
    assert kind_of_process(["python", "-m", "craft.cli.main", "lighthouse", "--workers", "2"]) == "lighthouse"
    assert kind_of_process(["python", "-m", "craft.agent.linux.forkserver", "5", "7"]) == "forkserver"
    assert kind_of_process(["python", "train.py"]) == "other"
