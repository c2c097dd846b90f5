"""The branches of a run's history: where each begins, and whether the journal gives a reason. For ``history``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from craft.telemetry.history import Commit, Run

Place = tuple[int, int]
"""(branch, step): history is in this order."""


def events(run: Run, name: str) -> list[dict[str, Any]]:
    return [line for line in run.journal if line.get("event") == name]


def place_of(commit: Commit) -> Place:
    return commit.branch, commit.step


def branch_of(line: Mapping[str, Any]) -> int:
    return int(line.get("branch", 0))


def by_place(run: Run) -> dict[Place, dict[str, Commit]]:
    """Return the commits of each step by worker, in the order of history."""
    found: dict[Place, dict[str, Commit]] = {}
    for worker_id, commits in run.commits.items():
        for commit in commits:
            found.setdefault(place_of(commit), {})[worker_id] = commit
    return dict(sorted(found.items()))


def first_step(run: Run) -> int:
    """Return where the run began: at 0, at ``start_step``, or after the steps of the checkpoint that it resumed from."""
    # A later restore says nothing about that.
    first = itertools.takewhile(lambda line: line.get("action") != "Restore", run.journal)
    begun = ("CheckpointRestored", "StartStepTaken")
    return next((int(line["step"]) for line in first if line.get("event") in begun), 0)


def begun_again(run: Run) -> dict[int, int]:
    """Return where the job began again after the loss of all workers: the step, by the new branch."""
    found = {branch_of(line): int(line["step"]) for line in run.journal if line.get("action") == "Restore"}
    # The action names a checkpoint; if that was damaged, an older one was used.
    lines = [*events(run, "StartStepTaken"), *events(run, "CheckpointRestored")]
    used = {branch_of(line): int(line["step"]) for line in lines}
    return {branch: used.get(branch, step) for branch, step in found.items()}


def check_branches(run: Run) -> Iterator[str]:
    """P2, P3: a new branch is journaled, begins no later than what was committed before it, and skips no step."""
    journaled = {branch_of(line) for name in ("RolledBack", "CheckpointRestored") for line in events(run, name)}
    journaled |= set(begun_again(run))
    places = by_place(run)
    known = {step for _, step in places}
    end: int | None = None
    for branch, group in itertools.groupby(places, key=lambda place: place[0]):
        steps = [step for _, step in group]
        if branch and branch not in journaled:
            yield f"P3: steps from {steps[0]} on were committed in branch {branch}, and the journal does not say why"
        if end is not None and steps[0] > end:
            yield f"P2: branch {branch} begins at step {steps[0]}, and what came before it ends with step {end - 1}"
        # A step that is in no branch at all is reported elsewhere.
        for step in sorted((set(range(steps[0], steps[-1])) - set(steps)) & known):
            yield f"P2: step {step} is missing from branch {branch}, which goes from {steps[0]} to {steps[-1]}"
        end = steps[-1] + 1
