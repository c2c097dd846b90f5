"""Show a running job: a live bar on a terminal, plain lines otherwise, and a summary at the end.

The agent hands over what it sees (``show``). A thread prints, so that a blocked terminal never delays the agent.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment

from craft.cli.output.tee import LeaderOrder, Tee
from craft.decide.job.fault_cost import FaultCost, goodput
from craft.decide.step.plan import cost_of_loss
from craft.protocol.messages import WorkerReport
from craft.settings.run import RunSettings
from craft.settings.rundir import RunDir
from craft.telemetry.explain.amounts import checkpoint, clock, count, counted, work
from craft.telemetry.explain.sentences import sentence
from craft.telemetry.history import Run, fault_costs, read_run, went_on
from craft.telemetry.records.journal import Tail
from craft.telemetry.records.journal_reader import as_record
from craft.telemetry.text.plain_text import indented, one_line

if TYPE_CHECKING:
    from craft.agent.outcome import JobOutcome
    from craft.agent.supervisor import Supervisor

logger = logging.getLogger(__name__)

_RECENT_LINES = 200
_PLAIN_INTERVAL_S = 2.0
_CLOCK_SLACK_S = 1.0
"""How much a clock that is adjusted in small steps may differ from one that is not."""


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's view of the job at one moment."""

    leader: WorkerReport | None
    """The step of the worker that is furthest."""
    num_members: int
    unwritten: str
    crowd: LeaderOrder


class _Lines:
    """Text that is printed verbatim: rich neither wraps it nor marks it up."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Segment(f"{self._text}\n")


class Display:
    """``show`` and ``say`` never block; the agent's thread calls them. The printing thread owns the rest."""

    def __init__(self, run_dir: RunDir, settings: RunSettings, console: Console | None = None) -> None:
        self._run_dir = run_dir
        self._settings = settings
        self._console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._tee = Tee(
            run_dir,
            settings.tee,
            alone=settings.lighthouse is None,
            colours=self._console.is_terminal and self._console.color_system is not None,
        )
        self._crowd = LeaderOrder()
        self._first_generation: int | None = None
        self._recent: deque[str] = deque(maxlen=_RECENT_LINES)
        """The last lines that workers printed, without their ids."""
        self._live: Progress | None = None
        self._task: Any = None
        self._journal = Tail(run_dir.journal)
        self._faults = 0
        self._stopping = False
        self._unwritten = ""
        self._steps = 0
        """As last reported: while a disk is full, the files do not have it."""
        self._last = (time.monotonic(), 0)
        self._rate = 0.0
        self._printed = 0.0
        self._has_begun = False
        # To the printing thread: what was seen, text to print, or None at the end.
        self._queue: queue.SimpleQueue[JobView | str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.say(f"craft: {count(settings.workers, 'worker')}, run directory {run_dir.path}")

    def show(self, supervisor: Supervisor) -> None:
        """Update the display."""
        if self._thread is None:
            # A daemon: if its terminal blocks, an interrupted job ends all the same.
            self._thread = threading.Thread(target=self._print_all, name="craft-display", daemon=True)
            self._thread.start()
        self._queue.put(self._see(supervisor))

    def _see(self, supervisor: Supervisor) -> JobView:
        relay = supervisor.relay
        if relay is None:
            return JobView(leader=None, num_members=0, unwritten="", crowd=LeaderOrder())
        generation = relay.directive.generation if relay.directive is not None else None
        if generation is not None and self._first_generation is None:
            self._first_generation = generation.number
        return JobView(
            leader=max(relay.reports().values(), key=lambda report: report.step, default=None),
            num_members=len(generation.members) if generation is not None else 0,
            unwritten=relay.unwritten(),
            crowd=LeaderOrder(
                started=tuple(supervisor.pool.started),
                ended=supervisor.pool.ended_ids,
                first_generation=self._first_generation,
            ),
        )

    def _print_all(self) -> None:
        over = False
        while not over:
            # If printing took long, only the newest view matters.
            waiting = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting.append(self._queue.get_nowait())
            seen = next((each for each in reversed(waiting) if isinstance(each, JobView)), None)
            over = None in waiting
            try:
                if seen is not None:
                    self._update(seen)
                for text in waiting:
                    if isinstance(text, str):
                        self._print(text)
                if over:
                    self._print_output(final=True)
            except Exception:
                logger.exception("cannot show the progress of the job")
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _update(self, seen: JobView) -> None:
        self._crowd = seen.crowd
        # First: the last output of a worker comes before the sentence that it is lost.
        self._print_output()
        self._show_events()
        self._show_unwritten(seen.unwritten)
        leader = seen.leader
        if leader is None or leader.step == 0:
            return
        self._steps = leader.step
        now = time.monotonic()
        if not self._has_begun:
            self._explain_cost(leader)
            self._has_begun = True
            self._last = (now, leader.step)
        if now - self._last[0] >= 1.0:
            # Fewer steps than before: the job went back.
            self._rate = max(0, leader.step - self._last[1]) / (now - self._last[0])
            self._last = (now, leader.step)
        if self._console.is_terminal:
            self._show_bar(leader, seen.num_members)
        elif now - self._printed >= _PLAIN_INTERVAL_S:
            self._printed = now
            self.say(self._line(leader, seen.num_members))

    def _print_output(self, *, final: bool = False) -> None:
        """Print the output of workers since the last call."""
        shown = self._tee.new_lines(self._crowd, time.monotonic(), final=final)
        if shown:
            self._recent.extend(line.partition(" ")[2] for line in shown)
            self._print("\n".join(shown))

    def _explain_cost(self, leader: WorkerReport) -> None:
        microbatches, size = leader.microbatches, self._settings.workers_per_replica
        computing = self._settings.workers // size
        if microbatches is not None and computing > 1 and self._settings.lighthouse is None:
            cost = cost_of_loss(microbatches, computing)
            self.say(
                f"{counted(microbatches, None)} over {computing} {'workers' if size == 1 else 'replicas'}: after the loss of"
                f" {'one' if size == 1 else 'a worker'}, a step computes {cost:.2f} times as long"
            )

    def _line(self, leader: WorkerReport, workers: int) -> str:
        total = f"/{leader.total_steps}" if leader.total_steps else ""
        return f"step {leader.step}{total}  {self._details(leader, workers)}"

    def _details(self, leader: WorkerReport, workers: int) -> str:
        metrics = "  ".join(f"{name} {value:.4g}" for name, value in leader.metrics.items())
        # This host does not know if the journal is on another one.
        faults = f"  {count(self._faults, 'fault')}" if self._settings.lighthouse is None else ""
        return one_line(f"{self._rate:.1f} steps/s  {metrics}  {count(workers, 'worker')}{faults}")

    def _show_bar(self, leader: WorkerReport, workers: int) -> None:
        if self._live is None:
            self._live = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.description}", markup=False),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._live.add_task("", total=leader.total_steps)
            self._live.start()
        self._live.update(self._task, completed=leader.step, description=self._details(leader, workers))

    def _show_events(self) -> None:
        for line in filter(None, map(as_record, self._journal.new_lines())):
            if line.get("outcome") == "Fault":
                self._faults += 1
            self._stopping = self._stopping or line.get("action") == "Stop"
            text = sentence(line)
            if text and not self._stopping:
                self.say(f"{clock(line['time'])}  {one_line(text)}")

    def _show_unwritten(self, trouble: str) -> None:
        if trouble and not self._unwritten:
            self.say(f"{clock(time.time())}  {trouble}. Training goes on; records wait until they can be written")
        elif self._unwritten and not trouble:
            self.say(f"{clock(time.time())}  records can be written again")
        self._unwritten = trouble

    def say(self, text: str) -> None:
        """Print a line above the progress bar; further ones are indented."""
        text = indented(text)
        if self._thread is None or self._thread is threading.current_thread():
            self._print(text)
        else:
            self._queue.put(text)

    def _print(self, text: str) -> None:
        encoding = self._console.encoding
        self._console.print(_Lines(text.encode(encoding, "backslashreplace").decode(encoding)))

    def close(self) -> None:
        """Print everything that is left; the workers have ended."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def summary(self, outcome: JobOutcome, wall_s: float) -> None:
        """Print what was done, what went wrong, and what it cost."""
        self._show_events()
        if outcome.traceback and not self._was_printed(outcome.traceback):
            self.say(f"  {outcome.traceback.rstrip()}")
        run = read_run(self._run_dir.path)
        steps = max((self._steps, *(commits[-1].step + 1 for commits in run.commits.values() if commits)))
        costs = fault_costs(run)
        word = "finished" if outcome.exit_code == 0 else f"ended with exit code {outcome.exit_code}"
        self.say(f"craft: {word}: {outcome.reason}")
        if outcome.faults is not None:
            self.say(f"  {count(steps, 'step')} in {wall_s:.1f} s, {count(len(outcome.faults), 'fault')} on all hosts")
            for fault in outcome.faults:
                self.say(f"  {fault}")
            self._say_newest(outcome.checkpoint)
            return
        # A failed job has no state to show for its time.
        share = _share(run, costs, steps, wall_s) if outcome.exit_code == 0 else ""
        self.say(f"  {count(steps, 'step')} in {wall_s:.1f} s, {count(self._faults, 'fault')}{share}")
        for cost in costs:
            lost = _unmeasured(run, cost) if cost.lost_s is None else f"{1000 * cost.lost_s:.0f} ms lost"
            again = f", {count(cost.steps_lost, 'step')} computed once more" if cost.steps_lost else ""
            self.say(f"  generation {cost.generation}: {cost.what}: {lost}{again}{work(cost.recovered)}")
        written = (line for line in reversed(run.journal) if line.get("event") == "CheckpointWritten")
        self._say_newest(next(written, None))

    def _was_printed(self, traceback: str) -> bool:
        """Return whether the worker's output ended with it: printing it once is enough."""
        wanted, recent = traceback.rstrip().splitlines(), list(self._recent)
        return any(recent[begin : begin + len(wanted)] == wanted for begin in range(len(recent) - len(wanted) + 1))

    def _say_newest(self, written: dict[str, Any] | None) -> None:
        if written is not None:
            self.say(f"  newest checkpoint: {checkpoint(written)} in {written['url']}")


def _share(run: Run, costs: list[FaultCost], steps: int, wall_s: float) -> str:
    """Return the goodput since the first commit, as the end of a line; empty if no step was committed."""
    first = min((commits[0].time for commits in run.commits.values() if commits), default=None)
    if first is None:
        return ""
    elapsed_s = time.time() - first
    if not 0 <= elapsed_s <= wall_s + _CLOCK_SLACK_S:
        return ", goodput not known (the clock was set while the job ran)"
    share = goodput(elapsed_s, costs, steps=steps)
    return "" if share is None else f", goodput {100 * share:.2f}%"


def _unmeasured(run: Run, cost: FaultCost) -> str:
    """Return why the cost of a loss is not known."""
    if cost.resumed is not None:
        return "lost before the first step was committed: this time is not counted"
    return "what it cost was not measured" if went_on(run, cost) else "the job ended before the next step"
