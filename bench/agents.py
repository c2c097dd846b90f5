"""Agents of a large job for ``control.py``: real relays with real connections, and made-up workers behind them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from craft.agent.host.relay import Relay
from craft.protocol.membership import Member
from craft.protocol.messages import Directive, Exited, WorkerReport
from craft.settings.rundir import RunDir
from craft.wire.auth import read_token
from craft.wire.codec import Message

LIMIT_S = 120.0
JOIN_SPREAD_S = 2.0
"""Workers join within this time, each in its own report: their scripts do not start at the same instant."""
STEP_S = 0.5
"""A step of the made-up training; its progress is in the reports."""


class Shared:
    """Directives that were decoded already.

    On real hosts each agent decodes its own. Here they share one processor and one memory, so the same frame after the
    same frame is decoded once; every frame still arrives over its own connection.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, str | bytes], Message] = {}
        self._kept: list[Directive | None] = []

    def decode(self, said: Directive | None, data: str | bytes, whole: Callable[[], Message]) -> Message:
        key = (id(said), data)
        if key not in self._last:
            if len(self._last) > 64:
                self._last.clear()
                self._kept.clear()
            # Kept, so that no other directive can come to have the same id.
            self._kept.append(said)
            self._last[key] = whole()
        return self._last[key]


class SimulatedAgent(Relay):
    """The agent's relay, and made-up workers."""

    def __init__(
        self, number: int, url: str, token: str, shared: Shared, hear: Callable[[int, Directive], None]
    ) -> None:
        super().__init__(f"host{number:04d}", url, token, lambda directive: hear(number, directive))
        # All agents are in this one process, but a host has one agent each.
        self.report = replace(self.report, pid=100_000 + number)
        self._shared = shared

    def decode(self, said: Directive | None, data: str | bytes) -> Message:
        return self._shared.decode(said, data, lambda: super(SimulatedAgent, self).decode(said, data))

    def start(self, worker: int) -> None:
        host = self.report.host
        member = Member(worker_id=f"{host}-w{worker}", host=host, address="10.20.30.40", store_port=40_000 + worker)
        self.take(WorkerReport(member=member, pid=200_000 + worker))

    def change(self, worker_id: str, **changes: Any) -> None:
        report = self.reports()[worker_id]
        self.take(replace(report, sequence=report.sequence + 1, **changes))

    def commit(self, step: int) -> None:
        """All its workers have one more step; what that changes in their reports is mere progress."""
        workers = tuple(
            replace(report, sequence=report.sequence + 1, step=step, step_s=STEP_S, metrics={"loss": 1 / step})
            for report in self.report.workers
        )
        self._update(urgent=False, workers=workers)

    def living(self) -> list[str]:
        ended = {exited.worker_id for exited in self.report.exited}
        return [worker_id for worker_id in self.reports() if worker_id not in ended]


@dataclass
class Loss:
    told_s: float
    """From the report to the last agent having the new directive."""
    first_s: float
    absorbed_s: float
    """Until the lighthouse has also taken in that every worker entered the new generation."""


class Simulation:
    """One lighthouse, and the agents that talk to it."""

    def __init__(self, agents: int, workers: int, run: RunDir, chance: random.Random) -> None:
        self._run = run
        self._chance = chance
        self._workers = workers
        self._shared = Shared()
        self._generation = [0] * agents
        self._heard = [0.0] * agents
        self._all_at = 0
        """The generation that all agents are waited for to have."""
        self._missing = 0
        self._all_have = asyncio.Event()
        url, token = run.read_address(), read_token(run.token)
        self.agents = [SimulatedAgent(number, url, token, self._shared, self._hear) for number in range(agents)]
        self._tasks: list[asyncio.Task[None]] = []

    def _hear(self, number: int, directive: Directive) -> None:
        generation = directive.generation.number if directive.generation is not None else 0
        if generation >= self._all_at > self._generation[number]:
            self._heard[number] = time.perf_counter()
            self._missing -= 1
            if not self._missing:
                self._all_have.set()
        self._generation[number] = generation

    def expect(self, generation: int) -> None:
        self._all_at, self._missing = generation, len(self.agents)
        self._all_have.clear()

    async def connect(self) -> float:
        began = time.perf_counter()
        for agent in self.agents:
            for worker in range(self._workers):
                agent.start(worker)
            self._tasks.append(asyncio.create_task(agent.follow_lighthouse()))
        for agent in self.agents:
            await asyncio.wait_for(agent.connected.wait(), LIMIT_S)
        return time.perf_counter() - began

    async def form(self) -> float:
        """Have all workers join; returns the time from the last of them to the last agent knowing the generation."""
        self.expect(1)
        everybody = [(agent, worker_id) for agent in self.agents for worker_id in agent.living()]
        self._chance.shuffle(everybody)
        for number, (agent, worker_id) in enumerate(everybody):
            agent.change(worker_id, joined=True)
            if number % 8 == 0:
                await asyncio.sleep(8 * JOIN_SPREAD_S / len(everybody))
        last = time.perf_counter()
        await asyncio.wait_for(self._all_have.wait(), LIMIT_S)
        return max(self._heard) - last

    async def enter(self, generation: int) -> None:
        """Every worker acts under the generation; returns once the lighthouse has taken that in."""
        living = sum(len(agent.living()) for agent in self.agents)
        offset = self._run.journal.stat().st_size if generation > 1 else 0
        for agent in self.agents:
            for worker_id in agent.living():
                agent.change(worker_id, generation=generation)
        mark = b'"event":"GenerationEntered"'
        deadline = time.monotonic() + LIMIT_S
        with self._run.journal.open("rb") as journal:
            journal.seek(offset)
            entered, rest = 0, b""
            while entered < living:
                text = rest + journal.read()
                whole, _, rest = text.rpartition(b"\n")
                entered += whole.count(mark)
                if time.monotonic() > deadline:
                    raise RuntimeError(f"only {entered} of {living} workers entered generation {generation}")
                await asyncio.sleep(0.02)

    async def train(self) -> None:
        """Progress, as long as this task lives: every host's workers commit a step now and then."""
        step = 0
        while True:
            step += 1
            for number, agent in enumerate(self.agents):
                agent.commit(step)
                if number % 20 == 19:
                    await asyncio.sleep(20 * STEP_S / len(self.agents))

    async def lose(self, generation: int) -> Loss:
        """One worker dies; returns how long it took until everybody knew."""
        self.expect(generation)
        agent = self._chance.choice(self.agents)
        victim = self._chance.choice(agent.living())
        began = time.perf_counter()
        agent.ended(Exited(worker_id=victim, exit_code=None, signal=9, time=time.time()))
        await asyncio.wait_for(self._all_have.wait(), LIMIT_S)
        told, first = max(self._heard) - began, min(self._heard) - began
        # Workers enter a generation once all its members have met: not before the last agent knows of it.
        await self.enter(generation)
        directive = agent.directive
        assert directive is not None and directive.generation is not None
        assert directive.generation.rank_of(victim) is None
        return Loss(told_s=told, first_s=first, absorbed_s=time.perf_counter() - began)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
