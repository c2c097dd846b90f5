"""``craft demo``: train a small model twice, kill workers of the second run, and compare the bits."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from craft.cli.output.echo import echo
from craft.telemetry.text import stdio

if TYPE_CHECKING:
    from craft.agent.supervisor import Supervisor
    from craft.cli.output.display import Display


@click.command()
@click.option("--workers", type=click.IntRange(2), default=4, show_default=True)
@click.option(
    "--kills", type=click.IntRange(1), default=2, show_default=True, help="Workers to kill, fewer than there are."
)
@click.option("--steps", type=click.IntRange(20), default=300, show_default=True)
@click.option("--seed", type=int, default=None, help="Chooses the victims and the moments.  [default: by the clock]")
def demo(workers: int, kills: int, steps: int, seed: int | None) -> None:
    """Train a small transformer twice: once undisturbed, once with workers killed by SIGKILL. Compare the weights.

    \b
    Example:
      craft demo --workers 4 --kills 2
    """
    if kills >= workers:
        raise click.UsageError(f"--kills {kills} of {workers} workers leaves none to go on: at most {workers - 1}")
    stdio.forgive()
    folder = Path(tempfile.mkdtemp(prefix="craft-demo-"))
    try:
        echo(f"1. A character-level transformer, {workers} workers, {steps} steps, undisturbed.\n")
        calm = _train(folder / "undisturbed", workers, steps, None)
        echo(f"\n2. The same, and {kills} of the workers are killed on the way: kill -9, no warning.\n")
        killer = Killer(random.Random(seed if seed is not None else time.time_ns()), kills, steps)
        rough = _train(folder / "disturbed", workers, steps, killer)
        same = _compare(folder, calm, rough, killer)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    raise SystemExit(0 if same else 1)


class Killer:
    """Kills a random worker at each of some random steps."""

    def __init__(self, draw: random.Random, kills: int, steps: int) -> None:
        self._draw = draw
        low, high = steps // 10, steps - steps // 5
        self._moments = sorted(draw.randrange(low, high) for _ in range(kills))
        self.killed: list[str] = []

    def act(self, supervisor: Supervisor, display: Display) -> None:
        reports = supervisor.relay.reports() if supervisor.relay is not None else {}
        living = {worker_id: report.pid for worker_id, report in reports.items() if worker_id not in self.killed}
        step = max((report.step for report in reports.values()), default=0)
        if self._moments and step >= self._moments[0]:
            self._moments.pop(0)
            victim = self._draw.choice(sorted(living))
            self.killed.append(victim)
            display.say(
                f"{time.strftime('%H:%M:%S')}  demo: kill -9 {living[victim]}  (worker {victim}, about step {step})"
            )
            os.kill(living[victim], signal.SIGKILL)


def _train(path: Path, workers: int, steps: int, killer: Killer | None) -> set[str]:
    """Run the job; return the final digests of the training state, one for each worker that finished."""
    from craft.agent.supervisor import supervise
    from craft.cli.output.display import Display
    from craft.settings.run import resolve, write_effective
    from craft.settings.rundir import claim
    from craft.telemetry.records.journal_reader import read_journal

    script = {"script": "craft.testing.demo_job", "as_module": True, "arguments": ("--steps", str(steps))}
    resolved = resolve({**script, "workers": workers}, None)
    run_dir = claim(path)
    write_effective(run_dir.config, resolved)
    display = Display(run_dir, resolved.settings)
    began = time.monotonic()

    def watch(supervisor: Supervisor) -> None:
        display.show(supervisor)
        if killer is not None:
            killer.act(supervisor, display)

    outcome = supervise(resolved.settings, run_dir, watch)
    display.close()
    display.summary(outcome, time.monotonic() - began)
    if outcome.exit_code != 0:
        raise SystemExit(outcome.exit_code)
    return {str(line["digest"]) for line in read_journal(run_dir.journal) if line.get("event") == "WorkerFinished"}


def _compare(folder: Path, calm: set[str], rough: set[str], killer: Killer) -> bool:
    from craft.telemetry.history import fault_costs, read_run

    echo("\n3. The training state at the end (parameters, buffers, optimizer, scheduler), as a hash:\n")
    echo(f"   undisturbed        {', '.join(sorted(calm))}")
    echo(f"   {len(killer.killed)} workers killed   {', '.join(sorted(rough))}\n")
    for cost in fault_costs(read_run(folder / "disturbed")):
        lost = "the job was over before the next step" if cost.lost_s is None else f"{1000 * cost.lost_s:.0f} ms"
        echo(f"   losing {cost.what} cost {lost}")
    same = len(calm) == 1 and calm == rough
    echo("\n   Bit-identical." if same else "\n   NOT the same: this is a bug in CRAFT, please report it.")
    return same
