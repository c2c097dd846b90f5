"""Small real processes that say what they are doing, like a worker, and then hang in a way of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from craft.agent.linux import procfs
from craft.agent.watchdog.watchdog import Watchdog

LIMIT_S = 30.0

PRELUDE = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from craft.protocol.values.activity import Phase
from craft.worker.report import stacks
from craft.worker.report.activity_page import ActivityPage

folder = Path(sys.argv[1])
activity = ActivityPage(folder / "activity")
stacks.register(folder / "stacks")

def beating():
    while True:
        activity.beat()
        time.sleep(0.02)

threading.Thread(target=beating, daemon=True).start()
for number in range(5):
    for phase in (Phase.LOADING, Phase.COMPUTING, Phase.EXCHANGING, Phase.UPDATING):
        activity.now(phase, number)
    activity.committed()
"""

HANGS = {
    "sleep": """
def hang_here():
    time.sleep(1000)
activity.now(Phase.COMPUTING, 41, 3)
hang_here()
""",
    "loop": """
def hang_here():
    while True:
        pass
activity.now(Phase.COMPUTING, 41, 3)
hang_here()
""",
    "gil": """
sleep = ctypes.PyDLL(None).sleep
def hang_here():
    while sleep(1000):
        pass
activity.now(Phase.COMPUTING, 41, 3)
hang_here()
""",
    "deadlock": """
lock = threading.Lock()
def hang_here():
    with lock:
        with lock:
            pass
activity.now(Phase.UPDATING, 41)
hang_here()
""",
    "loader": """
def hang_here():
    time.sleep(1000)
reading, writing = os.pipe()
if os.fork() == 0:
    hang_here()
activity.now(Phase.LOADING, 41, 3)
os.read(reading, 1)
""",
    "waiting": """
activity.now(Phase.EXCHANGING, 41)
threading.Event().wait()
""",
    "gil_in_exchange": """
sleep = ctypes.PyDLL(None).sleep
def hang_here():
    while sleep(1000):
        pass
activity.now(Phase.EXCHANGING, 41)
threading.Thread(target=hang_here).start()
threading.Event().wait()
""",
    "paused": """
with activity.paused("evaluation"):
    time.sleep(1000)
""",
    "steps": """
number = 5
while True:
    number += 1
    for phase in (Phase.LOADING, Phase.COMPUTING, Phase.EXCHANGING, Phase.UPDATING):
        activity.now(phase, number)
        time.sleep(0.005)
""",
    "silent": """
os.unlink(folder / "activity")
time.sleep(1000)
""",
}


class Victim:
    """One such process, in a session of its own; whatever it forked ends with it."""

    def __init__(self, folder: Path, kind: str) -> None:
        folder.mkdir()
        self.name = folder.name
        self.activity, self.stacks, self.log = folder / "activity", folder / "stacks", folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PRELUDE + textwrap.dedent(HANGS[kind]), str(folder)],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def watched_by(self, watchdog: Watchdog) -> None:
        watchdog.add(self.name, self.pid, self.activity, self.stacks, self.log)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        until(lambda: procfs.state(self.pid) == "T")

    def __enter__(self) -> Victim:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()


def until(condition: Callable[[], object]) -> None:
    """Wait for something to become true; fail if it does not."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
