"""What a person sees of a running job: a live bar on a terminal, plain lines otherwise, and a summary at the end."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from craft.cli.sentences import checkpoint, clock, count, sentence, work
from craft.decide.faults import goodput
from craft.decide.plan import cost_of_loss
from craft.settings.run import RunSettings
from craft.settings.rundir import RunDir
from craft.telemetry.history import fault_costs, read_run, went_on
from craft.telemetry.journal import Tail
from craft.telemetry.witnesses import counted

if TYPE_CHECKING:
    from craft.agent.supervisor import Outcome, Supervisor
    from craft.protocol.messages import WorkerReport

_PLAIN_INTERVAL_S = 2.0


class Display:
    """Called by the agent ten times a second; never blocks it."""

    def __init__(self, run_dir: RunDir, settings: RunSettings, console: Console | None = None) -> None:
        self._run_dir = run_dir
        self._settings = settings
        self._console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._live: Progress | None = None
        self._task: Any = None
        self._journal = Tail(run_dir.journal)
        self._faults = 0
        self._stopping = False
        self._unwritten = ""
        self._steps = 0
        """As last reported: where a disk was full, it is not in the files."""
        self._last = (time.monotonic(), 0)
        self._rate = 0.0
        self._printed = 0.0
        self._first_commit: float | None = None
        self.say(f"craft: {count(settings.workers, 'worker')}, run directory {run_dir.path}")

    def show(self, supervisor: Supervisor) -> None:
        """Bring the display up to date."""
        self._show_events()
        relay = supervisor.relay
        if relay is not None:
            self._show_unwritten(relay.unwritten())
        leader = (
            max(relay.reports().values(), key=lambda report: report.step, default=None) if relay is not None else None
        )
        if leader is None or leader.step == 0:
            return
        self._steps = leader.step
        now = time.monotonic()
        if self._first_commit is None:
            self._explain_cost(leader)
            self._first_commit = time.time()
            self._last = (now, leader.step)
        if now - self._last[0] >= 1.0:
            # Fewer steps than before: the job went back.
            self._rate = max(0, leader.step - self._last[1]) / (now - self._last[0])
            self._last = (now, leader.step)
        directive = relay.directive if relay is not None else None
        workers = len(directive.generation.members) if directive is not None and directive.generation is not None else 0
        if self._console.is_terminal:
            self._show_bar(leader, workers)
        elif now - self._printed >= _PLAIN_INTERVAL_S:
            self._printed = now
            self.say(self._line(leader, workers))

    def _explain_cost(self, leader: WorkerReport) -> None:
        microbatches, workers = leader.microbatches, self._settings.workers
        if microbatches is not None and workers > 1 and self._settings.lighthouse is None:
            cost = cost_of_loss(microbatches, workers)
            self.say(
                f"{counted(microbatches, None)} over {workers} workers: after the loss of one, a step computes"
                f" {cost:.2f} times as long"
            )

    def _line(self, leader: WorkerReport, workers: int) -> str:
        total = f"/{leader.total_steps}" if leader.total_steps else ""
        return f"step {leader.step}{total}  {self._details(leader, workers)}"

    def _details(self, leader: WorkerReport, workers: int) -> str:
        metrics = "  ".join(f"{name} {value:.4g}" for name, value in leader.metrics.items())
        # Where the journal is on another host, this one does not know.
        faults = f"  {count(self._faults, 'fault')}" if self._settings.lighthouse is None else ""
        return f"{self._rate:.1f} steps/s  {metrics}  {count(workers, 'worker')}{faults}"

    def _show_bar(self, leader: WorkerReport, workers: int) -> None:
        if self._live is None:
            self._live = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._live.add_task("", total=leader.total_steps)
            self._live.start()
        self._live.update(self._task, completed=leader.step, description=self._details(leader, workers))

    def _show_events(self) -> None:
        for line in self._journal.new_lines():
            if line.get("outcome") == "Fault":
                self._faults += 1
            self._stopping = self._stopping or line.get("action") == "Stop"
            text = sentence(line)
            if text and not self._stopping:
                self.say(f"{clock(line['time'])}  {text}")

    def _show_unwritten(self, trouble: str) -> None:
        if trouble and not self._unwritten:
            self.say(f"{clock(time.time())}  {trouble}. Training goes on; what cannot be written down waits")
        elif self._unwritten and not trouble:
            self.say(f"{clock(time.time())}  what happens can be written down again")
        self._unwritten = trouble

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        self._console.print(text, markup=False)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def summary(self, outcome: Outcome, wall_s: float) -> None:
        """What was done, what went wrong, what it cost."""
        self._show_events()
        if outcome.traceback:
            self.say(outcome.traceback.rstrip())
        run = read_run(self._run_dir.path)
        steps = max((self._steps, *(commits[-1].step + 1 for commits in run.commits.values() if commits)))
        costs = fault_costs(run)
        word = "finished" if outcome.exit_code == 0 else f"ended with exit code {outcome.exit_code}"
        self.say(f"craft: {word}: {outcome.reason}")
        training_s = time.time() - self._first_commit if self._first_commit is not None else wall_s
        if outcome.faults is not None:
            self.say(f"  {count(steps, 'step')} in {wall_s:.1f} s, {count(len(outcome.faults), 'fault')} on all hosts")
            for fault in outcome.faults:
                self.say(f"  {fault}")
            self._say_newest(outcome.checkpoint)
            return
        share = f"goodput {100 * goodput(training_s, costs):.2f}%"
        self.say(f"  {count(steps, 'step')} in {wall_s:.1f} s, {count(self._faults, 'fault')}, {share}")
        for cost in costs:
            unknown = "what it cost was not measured" if went_on(run, cost) else "the job ended before the next step"
            lost = unknown if cost.lost_s is None else f"{1000 * cost.lost_s:.0f} ms lost"
            again = f", {count(cost.steps_lost, 'step')} computed once more" if cost.steps_lost else ""
            self.say(f"  generation {cost.generation}: {cost.what}: {lost}{again}{work(cost.recovered)}")
        written = (line for line in reversed(run.journal) if line.get("event") == "CheckpointWritten")
        self._say_newest(next(written, None))

    def _say_newest(self, written: dict[str, Any] | None) -> None:
        if written is not None:
            self.say(f"  newest checkpoint: {checkpoint(written)} in {written['url']}")
