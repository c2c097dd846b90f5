"""Measures the lighthouse of a job of up to 1,000 hosts with 8 workers each: what it costs, and how fast it tells.

A real ``craft lighthouse`` process on one side; on the other side this process, in which every agent is the agent's own
relay with a WebSocket of its own. Only the workers behind the relays are made up. Example, a quick try:

    python bench/control.py --agents 100 --losses 3 --steady-s 3
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.report import Check, table
from msgspec.structs import replace

from craft.agent.relay import Relay
from craft.protocol.membership import Member
from craft.protocol.messages import Directive, Exited, WorkerReport
from craft.settings.rundir import RunDir
from craft.wire.auth import read_token
from craft.wire.codec import Message

MAX_CORES = 0.5
MAX_TELL_S = 0.25
BAR_AGENTS = 1000
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


@dataclass
class Measured:
    """The figures of one size."""

    agents: int
    workers: int
    connect_s: float = 0.0
    form_s: float = 0.0
    """From the last worker's joining to the last agent having the first generation."""
    steady_cores: float = 0.0
    steady_simulator_cores: float = 0.0
    losses: list[Loss] = field(default_factory=list)
    lighthouse_mb: float = 0.0


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
                workers = tuple(
                    replace(report, sequence=report.sequence + 1, step=step, step_s=STEP_S, metrics={"loss": 1 / step})
                    for report in agent.report.workers
                )
                agent._update(urgent=False, workers=workers)
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


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def start_lighthouse(run: RunDir, workers: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "craft.cli.main", "lighthouse", "--workers", str(workers), "--dir", str(run.path)]
    # A thousand agents in one process that is late now and then: who is silent is not the question here.
    command += ["--heartbeat-limit", "10"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if not process.stdout.readline().startswith("lighthouse listening"):
        raise RuntimeError("the lighthouse did not start")
    return process


async def simulate(found: Measured, run: RunDir, pid: int, args: argparse.Namespace) -> None:
    simulation = Simulation(found.agents, found.workers, run, random.Random(args.seed))
    try:
        found.connect_s = await simulation.connect()
        found.form_s = await simulation.form()
        await simulation.enter(1)
        training = asyncio.create_task(simulation.train())
        await asyncio.sleep(args.settle_s)
        began, before, own = time.perf_counter(), cpu_s(pid), cpu_s(os.getpid())
        await asyncio.sleep(args.steady_s)
        wall = time.perf_counter() - began
        found.steady_cores = (cpu_s(pid) - before) / wall
        found.steady_simulator_cores = (cpu_s(os.getpid()) - own) / wall
        for number in range(args.losses):
            found.losses.append(await simulation.lose(2 + number))
            await asyncio.sleep(args.settle_s)
        training.cancel()
        found.lighthouse_mb = resident_mb(pid)
    finally:
        await simulation.end()


def measure(agents: int, args: argparse.Namespace) -> Measured:
    found = Measured(agents=agents, workers=args.workers)
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder) / "run")
        process = start_lighthouse(run, agents * args.workers)
        try:
            asyncio.run(simulate(found, run, process.pid, args))
        finally:
            process.terminate()
            process.wait()
    told = [loss.told_s * 1e3 for loss in found.losses]
    print(
        f"{agents} agents: {found.steady_cores:.2f} cores, told in {statistics.median(told):.0f} ms "
        f"(worst {max(told):.0f}), simulator {found.steady_simulator_cores:.2f} cores",
        flush=True,
    )
    return found


def rows_of(measured: list[Measured]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for found in measured:
        told = [loss.told_s * 1e3 for loss in found.losses]
        rows.append(
            (
                str(found.agents),
                str(found.agents * found.workers),
                f"{found.steady_cores:.3f}",
                f"{found.steady_simulator_cores:.3f}",
                f"{statistics.median(told):.0f}",
                f"{max(told):.0f}",
                f"{statistics.median(loss.first_s * 1e3 for loss in found.losses):.0f}",
                f"{statistics.median(loss.absorbed_s for loss in found.losses):.2f}",
                f"{found.form_s:.2f}",
                f"{found.lighthouse_mb:.0f}",
            )
        )
    return rows


HEADER = (
    "agents", "workers", "cores", "simulator's cores", "told all (ms), median", "worst", "first one told (ms)",
    "absorbed (s)", "formed (s)", "memory (MB)",
)  # fmt: skip


def checks_of(measured: list[Measured]) -> list[Check]:
    checks = []
    for found in measured:
        if found.agents != BAR_AGENTS:
            continue
        told = [loss.told_s for loss in found.losses]
        cores = found.steady_cores
        what = f"cores of the lighthouse with {found.agents} agents and {found.agents * found.workers} workers"
        checks.append(Check(what, f"{cores:.2f}", f"below {MAX_CORES}", cores < MAX_CORES))
        for name, value in (("median", statistics.median(told)), ("worst", max(told))):
            what = f"from a loss to the last agent being told, {name} of {len(told)}"
            checks.append(Check(what, f"{value * 1e3:.0f} ms", f"below {MAX_TELL_S * 1e3:.0f} ms", value < MAX_TELL_S))
    return checks


def finish(measured: list[Measured], args: argparse.Namespace, load: float) -> int:
    checks = checks_of(measured)
    machine = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": load,
    }
    text = "\n".join(
        [
            f"The lighthouse of a large job: {args.workers} workers per agent, one WebSocket per agent, one machine",
            "",
            table(HEADER, rows_of(measured)),
            "",
            *map(str, checks),
            "",
            "Machine: " + ", ".join(f"{key} {value}" for key, value in machine.items()),
        ]
    )
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    whole = {
        "benchmark": "control",
        "settings": {key: value for key, value in vars(args).items() if key != "out"},
        "environment": machine,
        "sizes": [asdict(found) for found in measured],
        "checks": [asdict(check) for check in checks],
    }
    (out / "control.json").write_text(json.dumps(whole, indent=1) + "\n")
    (out / "control.txt").write_text(text + "\n")
    print(text)
    return 0 if all(check.passed for check in checks) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--workers", type=int, default=8, help="per agent")
    parser.add_argument("--losses", type=int, default=10)
    parser.add_argument("--steady-s", type=float, default=15.0)
    parser.add_argument("--settle-s", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"))
    args = parser.parse_args()
    # One socket per agent, here and in the lighthouse.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    load = os.getloadavg()[0]
    return finish([measure(agents, args) for agents in args.agents], args, load)


if __name__ == "__main__":
    sys.exit(main())
