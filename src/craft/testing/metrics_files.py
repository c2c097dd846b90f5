"""Check the metrics files of a run: every committed step once, in order, with the same values. For ``history``."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from craft.telemetry.history import Run
from craft.testing.branches import Place, begun_again, branch_of, events, place_of


def check_metrics(
    run: Run, dropped: Sequence[tuple[int, int]], files: Mapping[Path, list[dict[str, Any]]]
) -> Iterator[str]:
    """P3: every step is in ``metrics.jsonl``, in each file at most once and in order, with the same values in all.

    A job of several hosts has several files: a new leader writes on its host what the old one may not have written.
    """
    committed = {place_of(commit) for commits in run.commits.values() for commit in commits}
    written = {_metrics_place(line) for lines in files.values() for line in lines}
    again = begun_again(run)
    for branch, step in sorted(committed - written):
        if any(branch < other and step >= begin for other, begin in again.items()):
            # No worker was left to write it; it was computed again, and is there under the other branch.
            continue
        yield f"P3: step {step} is in metrics.jsonl 0 times{f', in branch {branch}' if branch else ''}"
    for _, step in sorted(written - committed):
        yield f"P3: step {step} is in metrics.jsonl, but was not committed"
    for path, lines in files.items():
        where = f" of {path}" if len(files) > 1 else ""
        counts = Counter(map(_metrics_place, lines))
        for place in sorted(place for place, count in counts.items() if count > 1 and place in committed):
            yield f"P3: step {place[1]} is in metrics.jsonl{where} {counts[place]} times"
        for before, after in itertools.pairwise(map(_metrics_place, lines)):
            if after < before:
                yield f"P3: metrics.jsonl{where} has step {after[1]} after step {before[1]}"
    yield from _same_metrics(files)
    if again and not events(run, "RolledBack") and not dropped:
        yield from _same_again(files)


def _metrics_place(line: Mapping[str, Any]) -> Place:
    return branch_of(line), int(line["step"])


def _same_metrics(files: Mapping[Path, list[dict[str, Any]]]) -> Iterator[str]:
    first: dict[Place, tuple[Path, dict[str, Any]]] = {}
    for path, lines in files.items():
        for line in lines:
            # Only the time of writing differs between workers.
            values = {name: value for name, value in line.items() if name != "time"}
            other, expected = first.setdefault(_metrics_place(line), (path, values))
            if other != path and values != expected:
                yield f"P3: step {line['step']}: metrics.jsonl of {other} has {expected}, that of {path} {values}"


def _same_again(files: Mapping[Path, list[dict[str, Any]]]) -> Iterator[str]:
    """P1: steps that were computed again after the loss of all workers gave the same numbers."""
    first: dict[int, dict[str, Any]] = {}
    for line in itertools.chain.from_iterable(files.values()):
        values = {name: value for name, value in line.items() if name not in ("time", "branch")}
        expected = first.setdefault(int(line["step"]), values)
        if values != expected:
            yield f"P1: step {line['step']} was computed twice, and gave {expected} and then {values}"
