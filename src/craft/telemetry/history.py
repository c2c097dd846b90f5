"""Read a run's files back: what happened (the journal) and which worker committed which step when."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

import msgspec

from craft.decide.faults import FaultCost, fault_cost
from craft.telemetry.journal import read_lines

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


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """All that a run left behind."""

    journal: tuple[dict[str, Any], ...]
    commits: dict[str, tuple[Commit, ...]]
    """By worker, in the order in which it wrote them."""


def read_run(path: Path) -> Run:
    """Read the files of a run directory; the job may still be running."""
    commits = {}
    for file in sorted(path.glob("workers/*/steps.jsonl")):
        lines = read_lines(file)
        commits[file.parent.name] = tuple(msgspec.convert(line, Commit, strict=False) for line in lines)
    return Run(journal=tuple(read_lines(path / "journal.jsonl")), commits=commits)


class _Losses(msgspec.Struct):
    """Losses that one generation answers."""

    lines: list[dict[str, Any]] = []
    generation: int = 0
    restored: bool = False
    """Whether nobody was left, so that some steps were computed once more."""


def fault_costs(run: Run) -> list[FaultCost]:
    """What each loss cost the others, from their commits around it. Losses answered by one generation count as one."""
    return [_cost(run, losses) for losses in _answered(run)]


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
            losses.restored = True
            while answered and answered[-1].generation not in used:
                # Its members were lost before they did anything: it was no answer.
                losses.lines = answered.pop().lines + losses.lines
    return answered


def _cost(run: Run, losses: _Losses) -> FaultCost:
    seen = min(float(line.get("seen", line["time"])) for line in losses.lines)
    what = ", ".join(str(line.get("worker_id") or line.get("host")) for line in losses.lines)
    commits = sorted((each for own in run.commits.values() for each in own), key=lambda commit: commit.time)
    before = [commit for commit in commits if commit.generation < losses.generation and commit.time <= seen]
    after = [commit for commit in commits if commit.generation >= losses.generation]
    if losses.restored and before:
        # What is computed once more is lost, too.
        furthest = max(commit.step for commit in before if commit.branch == before[-1].branch)
        after = [commit for commit in after if commit.step > furthest]
    return fault_cost(
        generation=losses.generation,
        what=what,
        seen=seen,
        last_commit=before[-1].time if before else None,
        resumed=after[0].time if after else None,
        step_s=_step_time(run, losses.generation),
    )


def _step_time(run: Run, generation: int) -> float:
    """Median time from commit to commit before ``generation``, over the last steps of one worker."""
    for commits in run.commits.values():
        times = [commit.time for commit in commits if commit.generation < generation][-21:]
        if len(times) > 1:
            return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))
    return 0.0
