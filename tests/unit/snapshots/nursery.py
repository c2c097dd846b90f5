"""Processes that run at once: forked from one in which torch is imported already and no thread runs.

A test starts one ``Nursery`` and gives it functions of modules of this folder. Run as a program, this is the process that forks.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODULE = f"{__package__}.nursery"


class Nursery:
    """The process that forks, as the test sees it."""

    def __init__(self) -> None:
        folder = str(Path(__file__).resolve().parents[MODULE.count(".")])
        # With one thread torch starts no others, which a fork would not have.
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._living: set[int] = set()

    def start(self, function: Callable[..., None], *args: Any) -> int:
        """Call a function in a new process; return its pid."""
        pid: int = self._ask("start", function, args)
        self._living.add(pid)
        return pid

    def wait(self, pid: int) -> int:
        """Wait for a process to end; return its exit code, negative if a signal ended it."""
        self._living.discard(pid)
        code: int = self._ask("wait", pid)
        return code

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for pid in self._living:
            self.kill(pid)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _ask(self, *request: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)


def serve() -> None:
    while True:
        try:
            what, *arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer = _start(*arguments) if what == "start" else _wait(*arguments)
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()


def _start(function: Callable[..., None], args: tuple[Any, ...]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        function(*args)
        code = 0
    except BaseException:  # noqa: BLE001  (the edge of a process)
        traceback.print_exc()
    os._exit(code)


def _wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    # What torch loads only when it is used is loaded here, so that no child has to.
    from .scene import Trained

    Trained()
    serve()
