"""A loop in which the test is the clock, the disk and the listener."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from craft.control.core.loop import Loop
from craft.control.core.persistence import Durable, restore
from craft.control.replay.journal_replay import JournalReplay
from craft.decide.job.state import JobState
from craft.decide.techniques import defaults
from craft.protocol.events import WorkerFailed
from craft.protocol.membership import Member
from craft.protocol.messages import Broken, Exited, HostReport, WorkerReport


class FakeClock:
    """Time that passes only when a test says so; timers fire in their order."""

    def __init__(self) -> None:
        self.time = 1000.0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.time + delay_s, next(self._numbers), call))

    def pass_s(self, duration_s: float) -> None:
        """Let time pass, and everything happen that is due."""
        end = self.time + duration_s
        while self._timers and self._timers[0][0] <= end + 1e-9:
            due, _, call = heapq.heappop(self._timers)
            self.time = max(self.time, due)
            call()
        self.time = max(self.time, end)

    def stall_s(self, duration_s: float) -> None:
        """Let time pass in which this process does not run; what was due happens late."""
        self.time += duration_s
        self.pass_s(0.0)


class Lab(FakeClock):
    """A loop with everything around it in memory."""

    def __init__(
        self,
        slots: int = 2,
        min_workers: int = 1,
        durable: Durable | None = None,
        journal: Sequence[dict[str, Any]] = (),
    ) -> None:
        """``durable`` and the lines of ``journal`` are what an earlier one left."""
        super().__init__()
        self.order: list[str] = []
        """What the loop did to its surroundings, in order."""
        self.lines: list[dict[str, Any]] = []
        self.saved: list[Durable] = []
        self.told: list[JobState] = []
        self._sequence = 0
        replay = JournalReplay({"time": self.time, **line} for line in journal)
        self.loop = Loop(
            restore(JobState(slots=slots, min_workers=min_workers), durable),
            policies=defaults().policies(),
            store=self,
            journal=self,
            host=self,
            faults=replay.faults,
            journaled=replay.journaled,
        )

    def nonce(self) -> str:
        return f"n{len(self.saved)}"

    def tell(self, state: JobState) -> None:
        self.order.append("tell")
        self.told.append(state)

    def save(self, durable: Durable) -> None:
        self.order.append("save")
        self.saved.append(durable)

    def write(self, kind: str, value: msgspec.Struct | dict[str, Any], **more: Any) -> None:
        fields = value if isinstance(value, dict) else msgspec.to_builtins(value)
        self.lines.append({"kind": kind, **fields, **more})
        self.order.append(str(self.lines[-1][kind]))

    def report(
        self, *workers: WorkerReport, exited: tuple[Exited, ...] = (), host: str = "a", pid: int = 1, **more: Any
    ) -> None:
        self._sequence += 1
        self.loop.handle_report(
            HostReport(host=host, pid=pid, sequence=self._sequence, workers=workers, exited=exited, **more)
        )

    def names(self, kind: str = "event") -> list[str]:
        """The names of all events, actions or outcomes so far."""
        return [line[kind] for line in self.lines if line["kind"] == kind]

    @property
    def generation(self) -> int:
        generation = self.loop.state.generation
        return 0 if generation is None else generation.number


def worker(
    name: str,
    *,
    joined: bool = True,
    generation: int = 0,
    step: int = 0,
    broken: int | None = None,
    failed: WorkerFailed | None = None,
    complete: bool = False,
    digest: str | None = None,
    **more: Any,
) -> WorkerReport:
    return WorkerReport(
        member=Member(worker_id=name),
        pid=100,
        joined=joined,
        generation=generation,
        step=step,
        broken=None if broken is None else Broken(generation=broken, detail="connection reset"),
        failed=failed,
        complete=complete,
        digest=digest,
        **more,
    )


def dead(name: str, signal: int | None = 9, exit_code: int | None = None) -> Exited:
    return Exited(worker_id=name, exit_code=exit_code, signal=signal, time=999.5)


@pytest.fixture(name="worker")
def _worker() -> Callable[..., WorkerReport]:
    return worker


@pytest.fixture(name="dead")
def _dead() -> Callable[..., Exited]:
    return dead


@pytest.fixture
def lab() -> Lab:
    """A job of two slots that nobody has joined."""
    return Lab()


@pytest.fixture
def running() -> Lab:
    """A job of two workers, w0 and w1 on host a, that act under generation 1."""
    lab = Lab()
    lab.report(worker("w0"), worker("w1"))
    lab.report(worker("w0", generation=1), worker("w1", generation=1))
    return lab


@pytest.fixture
def make_lab() -> type[Lab]:
    return Lab


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()
