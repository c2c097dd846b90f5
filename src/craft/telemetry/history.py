"""Read the files of a run: the journal, the commits of each worker, and the generations that it entered."""

from __future__ import annotations

import itertools
import logging
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from craft.decide.job.fault_cost import FaultCost, fault_cost
from craft.protocol.events import Recovered
from craft.protocol.generation_log import Entered
from craft.telemetry.records.journal import read_lines
from craft.telemetry.records.journal_reader import read_journal

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOSSES = frozenset({"WorkerLost", "WorkerFailed", "HostLost"})


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a worker's ``steps.jsonl``."""

    step: int
    branch: int
    time: float
    generation: int
    world_size: int
    microbatches: tuple[int, ...]
    plan: dict[int, str | None]
    replica: int | None = None
    position: int | None = None
    mates: tuple[str, ...] = ()
    """The workers of its replica in the order of positions; empty where every replica is one worker."""

    def planned_for(self, worker_id: str) -> tuple[int, ...]:
        """Return the microbatches that the plan gives to ``worker_id``, which wrote this line: all of its replica."""
        own = self.mates[0] if self.mates else worker_id
        return tuple(sorted(microbatch for microbatch, owner in self.plan.items() if owner == own))


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a run."""

    journal: tuple[dict[str, Any], ...]
    commits: dict[str, tuple[Commit, ...]]
    """By worker, in the order in which it wrote them."""
    entries: dict[str, tuple[Entered, ...]] = {}
    """Generations, likewise."""


def read_run(path: Path) -> Run:
    """Read the files of a run directory; the job may still be running."""
    commits = {file.parent.name: _typed(file, Commit) for file in sorted(path.glob("workers/*/steps.jsonl"))}
    entries = {file.parent.name: _typed(file, Entered) for file in sorted(path.glob("workers/*/generations.jsonl"))}
    return Run(journal=tuple(read_journal(path / "journal.jsonl")), commits=commits, entries=entries)


def _typed(file: Path, kind: type[T]) -> tuple[T, ...]:
    """Return the lines of a file without damaged ones, each of which is logged."""
    found = []
    for line in read_lines(file):
        try:
            found.append(msgspec.convert(line, kind, strict=False))
        except msgspec.ValidationError as error:
            logger.warning("%s: a line is damaged and left out: %s", file, error)
    return tuple(found)


class _Losses(msgspec.Struct):
    """Losses that one generation answers."""

    lines: list[dict[str, Any]] = []
    generation: int = 0
    restored: dict[str, Any] | None = None
    """The line of the Restore, if no worker was left, so that some steps were computed again."""


def fault_costs(run: Run) -> list[FaultCost]:
    """Return what each loss cost, from the commits around it. Losses that were overcome together count as one."""
    costs = [_cost(run, losses) for losses in _answered(run)]
    together = (tuple(some) for _, some in itertools.groupby(costs, key=lambda cost: cost.resumed))
    return [_one(run, some) for some in together]


def went_on(run: Run, cost: FaultCost) -> bool:
    """Return whether any step was committed after a loss, perhaps one that had been committed before."""
    return any(commit.generation >= cost.generation for commits in run.commits.values() for commit in commits)


def _one(run: Run, costs: tuple[FaultCost, ...]) -> FaultCost:
    """Merge several losses before the next commit into one, with the workers' report about it."""
    last = costs[-1]
    lines = (line for line in run.journal if line.get("event") == "Recovered")
    reports = (msgspec.convert(line, Recovered, strict=False) for line in lines)
    begun = _beginnings(run)
    # A worker of a restored job knows no commit from before: its report is not about earlier losses.
    recovered = next(
        (
            each
            for each in reports
            if each.since < last.generation <= each.generation and _start_of(begun, each.generation) <= last.generation
        ),
        None,
    )
    # Their figure is in the journal, too: one fault has one cost.
    known = recovered.lost_s if recovered is not None else None
    return replace(
        last,
        what=", ".join(cost.what for cost in costs),
        seen=costs[0].seen,
        lost_s=costs[0].lost_s if known is None else known,
        recovered=recovered,
    )


def _beginnings(run: Run) -> list[int]:
    """Return the first generation after the start of the job, and after each restore."""
    found, beginning = [], True
    for line in run.journal:
        beginning = beginning or line.get("action") == "Restore"
        if line.get("action") == "Reconfigure" and beginning:
            found.append(int(line["generation"]))
            beginning = False
    return found


def _start_of(begun: Iterable[int], generation: int) -> int:
    return max((first for first in begun if first <= generation), default=0)


def _answered(run: Run) -> list[_Losses]:
    used = {commit.generation for commits in run.commits.values() for commit in commits}
    answered: list[_Losses] = []
    losses = _Losses()
    for line in run.journal:
        if line.get("event") in _LOSSES:
            losses.lines.append(line)
        elif line.get("action") == "Reconfigure" and losses.lines:
            losses.generation = int(line["generation"])
            answered.append(losses)
            losses = _Losses()
        elif line.get("action") == "Restore":
            losses.restored = line
            while answered and answered[-1].generation not in used:
                # Its members were lost before they committed anything: it answered no loss.
                losses.lines = answered.pop().lines + losses.lines
    return answered


def _cost(run: Run, losses: _Losses) -> FaultCost:
    seen = min(float(line.get("seen", line["time"])) for line in losses.lines)
    what = ", ".join(str(line.get("worker_id") or line.get("host")) for line in losses.lines)
    commits = sorted((each for own in run.commits.values() for each in own), key=lambda commit: commit.time)
    before = [commit for commit in commits if commit.generation < losses.generation and commit.time <= seen]
    after = [commit for commit in commits if commit.generation >= losses.generation]
    lost: dict[int, int] = {}
    if losses.restored is not None and before:
        # Steps that are computed again are lost, too.
        last = [commit for commit in before if commit.branch == before[-1].branch]
        lost = {each.step: len(each.plan) for each in last if each.step >= int(losses.restored["step"])}
        furthest = max(commit.step for commit in last)
        after = [commit for commit in after if commit.step > furthest]
    cost = fault_cost(
        generation=losses.generation,
        what=what,
        seen=seen,
        last_commit=before[-1].time if before else None,
        resumed=after[0].time if after else None,
        step_s=_step_time(run, losses.generation),
    )
    return replace(cost, steps_lost=len(lost), microbatches_lost=sum(lost.values()))


def _step_time(run: Run, generation: int) -> float:
    """Median time from commit to commit before ``generation``, over the last steps of one worker."""
    for commits in run.commits.values():
        times = [commit.time for commit in commits if commit.generation < generation][-21:]
        if len(times) > 1:
            return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))
    return 0.0
