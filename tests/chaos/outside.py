"""Faults that come from outside of a job, which ``craft chaos`` does not make: everything lost at once, hosts that go and come.

Enters: a soak, a seed, again and again the job's status. Leaves: the faults, carried out; and a journal of them, in the
format of the lighthouse's.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from craft.protocol.events import FaultInjected
from craft.telemetry.records.journal import Journal, read_lines

LIVING = ("starting", "waiting", "member")
APART_S = 4.0
"""Two of these faults are at least so far apart."""

Status = dict[str, Any]


class Surroundings(Protocol):
    """What it does to the processes that a soak started."""

    run_dir: Path

    def end_host(self, host: str) -> None:
        """SIGTERM to the agent of a host; it is started again once it has ended."""

    def restart_lighthouse(self) -> None:
        """SIGKILL to the lighthouse and its keeper, and start both again."""


class Outside:
    """Draws kinds in rounds, so that each comes as often as the others, and carries out each as soon as the job allows it."""

    def __init__(self, soak: Surroundings, journal: Path, seed: int, mean_s: float) -> None:
        self._soak = soak
        self._draw = random.Random(f"outside {seed}")
        self._mean_s = mean_s
        self._journal = Journal(journal)
        self._kinds = self._rounds()
        self._next = next(self._kinds)
        self._due_s = self._pause()

    def _rounds(self) -> Iterator[str]:
        while True:
            yield from self._draw.sample(sorted(self._makers), len(self._makers))

    def _pause(self) -> float:
        return APART_S + self._draw.expovariate(1.0 / max(0.1, self._mean_s - APART_S))

    @property
    def _makers(self) -> dict[str, Callable[[Status], str | None]]:
        """By kind: makes the fault and returns whom it hit; None if the job cannot stand it now."""
        return {
            "kill-all": self._kill_all,
            "end-host": self._end_host,
            "stop-lighthouse": self._stop_lighthouse,
            "restart-lighthouse": self._restart_lighthouse,
        }

    def look(self, status: Status, elapsed_s: float) -> None:
        """Make the next fault if it is due; ``elapsed_s`` counts from the beginning."""
        if elapsed_s < self._due_s or status["state"] != "running":
            return
        victim = self._makers[self._next](status)
        if victim is not None:
            self._due_s = elapsed_s + self._pause()
            self._next = next(self._kinds)

    def _tell(self, kind: str, host: str | None = None) -> None:
        # Before it is done: what follows from it is not in any journal earlier than it.
        self._journal.write("event", FaultInjected(injection_id=uuid.uuid4().hex, fault=kind, host=host))

    def _kill_all(self, status: Status) -> str | None:
        """SIGKILL to every worker, spares included, at the same instant; only where there is a checkpoint."""
        written = (
            line.get("event") == "CheckpointWritten" for line in read_lines(self._soak.run_dir / "journal.jsonl")
        )
        pids = [worker["pid"] for worker in status["workers"] if worker["state"] in LIVING and worker["pid"]]
        if not pids or not any(written):
            return None
        self._tell("kill-all")
        send(signal.SIGSTOP, pids)
        send(signal.SIGKILL, pids)
        return "all workers"

    def _end_host(self, status: Status) -> str | None:
        """Let a host leave in order, as before its maintenance; the other one must be able to go on."""
        connected = sorted(agent["host"] for agent in status["agents"] if agent["connected"])
        trains = {worker["host"] for worker in status["workers"] if worker["state"] == "member" and worker["step"] > 0}
        if len(connected) < 2 or not trains >= set(connected):
            return None
        host = str(self._draw.choice(connected))
        self._tell("end-host", host)
        self._soak.end_host(host)
        return host

    def _stop_lighthouse(self, status: Status) -> str | None:
        self._tell("stop-lighthouse")
        send(signal.SIGSTOP, [status["lighthouse"]["pid"]])
        return "the lighthouse"

    def _restart_lighthouse(self, status: Status) -> str | None:
        self._tell("restart-lighthouse")
        self._soak.restart_lighthouse()
        return "the lighthouse"


def send(number: signal.Signals, pids: Iterable[int]) -> None:
    """Send a signal to processes; one that has ended is left out."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
