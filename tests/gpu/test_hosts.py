"""Several hosts whose workers share one GPU: gradients go within hosts first, by NCCL, and a loss leaves no trace."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.hosts import REPLACE, Hosts, assert_ended_well
from tests.integration.jobs import References

WITHIN_FIRST = "gradients travel within 2 hosts first, by NCCL"
STEPS = 60


class OneMachine:
    """In the place of a network: hosts that have only names of their own."""

    def address(self, name: str) -> str:
        return "127.0.0.1"

    def inside(self, name: str) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        """There is nothing to take down."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path / "hosts", ("a", "b"), workers=2, network=OneMachine(), port=free_port())
    yield made
    made.end()


def logs(hosts: Hosts) -> dict[str, str]:
    return {
        log.parent.name: log.read_text() for job in hosts.jobs.values() for log in job.run_dir.glob("workers/*/log")
    }


def test_a_worker_that_dies_where_gradients_travel_within_hosts_first_leaves_no_trace_P1(
    hosts: Hosts, references: References
) -> None:
    """It is replaced there: in between its host has one worker, and gradients go straight."""
    arguments = ("--steps", str(STEPS), "--width", "256")
    gate = hosts.run_dir.with_name("gate")
    hosts.light(limit_s=30)
    for name in hosts.names:
        hosts.start(name, *arguments, "--slow-until", str(gate), environment={**REPLACE, "CRAFT_HOLD": "host"})
    hosts.reach_step(10)
    os.kill(hosts.living("a")["a-w1"], signal.SIGKILL)
    hosts.wait_for_committing("a", 3)
    gate.touch()
    assert_ended_well(hosts)
    hosts.assert_exact(references.digest(*arguments, workers=1), steps=STEPS, lost={"a"}, faults=1)
    assert all(WITHIN_FIRST in log for log in logs(hosts).values()), hosts.tell()
