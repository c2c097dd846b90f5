"""The fork server, without workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.system_calls import Rule, Switch

UNREAD = """
import select, socket, threading
from craft.agent.linux.forkserver import ForkServer

agent, channel = socket.socketpair()

def end() -> None:
    select.select([agent], [], [])
    agent.close()

threading.Thread(target=end).start()
ForkServer(channel).serve()
"""


def test_an_agent_that_ends_before_it_has_read_everything_is_an_end_like_any_other() -> None:
    done = subprocess.run([sys.executable, "-c", UNREAD], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


REFUSED = """
import socket, sys, threading
from craft.agent.linux.forkserver import Fork, ForkServer
import msgspec

agent, channel = socket.socketpair()

def end() -> None:
    file = agent.makefile("rb")
    request = Fork(worker_id="w0", script="none", arguments=(), as_module=False, environment={}, log=sys.argv[1])
    for kind in ("Ready", "NotForked", "Forked", "Ended"):
        print(file.readline().decode(), end="", flush=True)
        if kind in ("Ready", "NotForked"):
            agent.sendall(msgspec.json.encode(request) + b"\\n")
    agent.close()
    file.close()

threading.Thread(target=end).start()
ForkServer(channel).serve()
"""


def test_a_fork_that_fails_ends_nobody_and_the_next_one_works(tmp_path: Path) -> None:
    switch = Switch(tmp_path / "switch")
    switch.set(Rule("fork", "EAGAIN", times=1))
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, str(tmp_path / "log")],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **switch.environment()},
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["type"] for each in said] == ["Ready", "NotForked", "Forked", "Ended"], done.stderr
    assert said[1]["why"] == "Resource temporarily unavailable"
