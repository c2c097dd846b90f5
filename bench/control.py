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
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.agents import Loss, Simulation
from bench.report import table
from bench.verdict import Check

from craft.settings.rundir import RunDir

MAX_CORES = 0.5
MAX_TELL_S = 0.25
BAR_AGENTS = 1000


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


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def start_lighthouse(run: RunDir, workers: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "craft.cli.main", "lighthouse", "--workers", str(workers), "--dir", str(run.path)]
    # A thousand agents in one process that is late now and then: who is silent is not the question here.
    command += ["--heartbeat-limit", "10", "--with-parent"]
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
