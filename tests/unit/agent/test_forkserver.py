"""The fork server, without workers."""

from __future__ import annotations

import subprocess
import sys

UNREAD = """
import select, socket, threading
from craft.agent.forkserver import ForkServer

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
