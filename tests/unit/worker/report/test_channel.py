"""A worker's end of the socket to its agent: directives are handled one after the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# In a process of its own: a worker ends with its agent.
SLOW = """
import os, socket, sys, threading
from craft.protocol.membership import Member
from craft.protocol.messages import Directive, WorkerReport
from craft.wire import codec
from craft.worker.report.channel import Channel

server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
channel = Channel(sys.argv[1], WorkerReport(member=Member(worker_id="w0"), pid=1))
agent, _ = server.accept()
arrived, both, handled = threading.Event(), threading.Event(), []
channel.listen(lambda directive: arrived.set())
agent.sendall(codec.frame(Directive(sequence=1)))
assert arrived.wait(30.0)

def handle(directive):
    if directive.sequence == 1:
        # The thread that listens is slow, and the next one comes meanwhile.
        agent.sendall(codec.frame(Directive(sequence=2)))
        both.wait(1.0)
    handled.append(directive.sequence)
    if len(handled) == 2:
        both.set()

channel.listen(handle)
assert both.wait(30.0)
print(handled, flush=True)
os._exit(0)
"""


def test_the_latest_directive_is_handled_last_though_it_comes_while_another_one_is_handled(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLOW, str(tmp_path / "agent")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[1, 2]\n"
