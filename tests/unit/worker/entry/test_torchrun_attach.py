"""The request of a process that torchrun started, to the agent of its host."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec
import pytest

from craft.protocol.errors import Unreachable
from craft.protocol.values.attach import Adopt, Adopted
from craft.settings.torchrun import Launched
from craft.worker.entry.torchrun_attach import _request

LAUNCHED = Launched(
    run_id="job",
    lighthouse="http://127.0.0.1:1",
    run_dir=Path("run"),
    local_rank=2,
    local_world_size=4,
    restarts=0,
)


def test_a_process_names_itself_and_gets_the_settings_of_its_worker() -> None:
    mine, agents = socket.socketpair()
    with mine, agents:
        agents.sendall(msgspec.json.encode(Adopted(environment={"CRAFT_WORKER_ID": "w7"})) + b"\n")
        assert _request(mine, LAUNCHED).environment == {"CRAFT_WORKER_ID": "w7"}
        asked = msgspec.json.decode(agents.recv(4096), type=Adopt)
    assert asked == Adopt(pid=os.getpid(), local_rank=2)


@pytest.mark.parametrize("answer", [b"", b"{\n", b"[1]\n"])
def test_an_agent_that_ends_or_answers_nonsense_is_unreachable(answer: bytes) -> None:
    mine, agents = socket.socketpair()
    with mine, agents:
        agents.sendall(answer)
        agents.shutdown(socket.SHUT_WR)
        with pytest.raises(Unreachable, match=r"run/agent\.log"):
            _request(mine, LAUNCHED)
