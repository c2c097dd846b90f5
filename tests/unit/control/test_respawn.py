"""A serving process that lives and does not answer, and a keeper that is stopped itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from craft.control.process import BEAT_S

SCRIPT = """
import logging, os, socket, sys, time
from craft.control import respawn

logging.basicConfig(stream=sys.stdout, format="%(message)s")
respawn.ANSWER_LIMIT_S = 1.0

def serve(listener, say, beat):
    say(f"serves {len(sys.argv)}")
    for _ in range(4):
        beat()
        time.sleep(0.1)
    if not os.path.exists(sys.argv[1]):
        open(sys.argv[1], "w").close()
        time.sleep(600)
    return 0

with socket.create_server(("127.0.0.1", 0)) as listener:
    sys.exit(respawn.keep(serve, listener, print))
"""


def test_a_child_whose_event_loop_does_not_run_is_killed_and_followed_by_another(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "hung")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert found.returncode == 0, found.stderr
    assert "the serving process has not answered for 1 s: killing it and starting another one" in found.stdout
    assert "the serving process ended (killed by SIGKILL)" in found.stdout


LASTING = """
import logging, os, socket, sys, time
from craft.control import respawn

logging.basicConfig(stream=sys.stdout, format="%(message)s")

def serve(listener, say, beat):
    say("serves")
    while not os.path.exists(sys.argv[1]):
        beat()
        time.sleep(0.05)
    return 7

with socket.create_server(("127.0.0.1", 0)) as listener:
    sys.exit(respawn.keep(serve, listener, lambda line: print(line, flush=True)))
"""


def test_a_keeper_that_was_stopped_and_goes_on_takes_that_for_no_signal_to_end(tmp_path: Path) -> None:
    """Its wait is interrupted after its time: Python then returns what is no signal at all."""
    end = tmp_path / "end"
    command = [sys.executable, "-c", LASTING, str(end)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None and keeper.stdout.readline() == "serves\n"
        for _ in range(3):
            os.kill(keeper.pid, signal.SIGSTOP)
            # Longer than it waits for a signal at a time.
            time.sleep(3 * BEAT_S)
            os.kill(keeper.pid, signal.SIGCONT)
            time.sleep(BEAT_S)
        assert keeper.poll() is None
        end.touch()
        # The child ends by itself; one that had been told to would have ended by SIGTERM.
        assert "exit code 7" in keeper.stdout.readline()
        keeper.terminate()
        keeper.wait(30)
