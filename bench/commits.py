"""Reads the commit lines that workers write, and finds in them how long a kill held the survivors up."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

STEP_WINDOW = 50
"""How many commits before a kill give the undisturbed step time."""


@dataclass(frozen=True)
class Commit:
    """One worker's commit of one step; ``time_s`` is in unix seconds."""

    step: int
    time_s: float
    generation: int
    world_size: int
    computed: bool = True
    """Whether this worker computed some of it; one that catches up does not."""
    owners: int = 0
    """How many workers the plan names: in a sharded job, the replicas that compute. 0: the line has no plan."""


@dataclass(frozen=True)
class Recovery:
    """What one kill cost."""

    recovery_s: float
    """From the signal until the last survivor's first commit of a newer generation."""
    first_s: float
    """The same, until the first survivor's."""
    step_s: float
    """The median undisturbed step, commit to commit, before the kill."""

    @property
    def beyond_step_s(self) -> float:
        return self.recovery_s - self.step_s


def read_commits(path: Path) -> list[Commit]:
    """Return the commits in ``path``, oldest first; a line that is still being written is left out."""
    if not path.exists():
        return []
    complete, _, _ = path.read_text().rpartition("\n")
    rows = [json.loads(line) for line in complete.splitlines() if line]
    return [
        Commit(
            row["step"],
            row["time"],
            row["generation"],
            row["world_size"],
            bool(row.get("microbatches", True)),
            len(set(row.get("plan", {}).values())),
        )
        for row in rows
    ]


def steady(commits: Sequence[Commit], world_size: int, length: int) -> bool:
    """Whether the last ``length`` commits all came from one generation of ``world_size`` workers."""
    tail = commits[-length:]
    return len(tail) == length and {(c.generation, c.world_size) for c in tail} == {(tail[-1].generation, world_size)}


def step_time(commits: Sequence[Commit]) -> float:
    """Return the median time from commit to commit over the last ``STEP_WINDOW`` of ``commits``."""
    return statistics.median(b.time_s - a.time_s for a, b in pairwise(commits[-STEP_WINDOW - 1 :]))


def recovery_of(kill_time_s: float, survivors: Mapping[str, Sequence[Commit]]) -> Recovery | None:
    """Return what the kill cost, or None while some survivor has not yet committed in a newer generation."""
    firsts, steps = [], []
    for commits in survivors.values():
        before = [c for c in commits if c.time_s <= kill_time_s]
        newer = [c for c in commits if c.time_s > kill_time_s and c.generation > before[-1].generation]
        if not newer:
            return None
        firsts.append(newer[0].time_s - kill_time_s)
        steps.append(step_time(before))
    return Recovery(max(firsts), min(firsts), statistics.median(steps))
