"""Measure the inputs of a plan from a run: from its journal and its workers' commits."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from craft.telemetry.history import Run, fault_costs


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one run. None: the run does not show it."""

    workers: int | None
    """Slots of the job."""
    microbatches: int | None
    elapsed_s: float
    """From its first commit to its last."""
    step_s: float | None
    """Median from commit to commit."""
    checkpoint_s: float | None
    """Median time to write one, beside training."""
    stall_s: float | None
    """What one cost training, by the last measurement."""
    failures: int
    lost_workers: int | None
    """Workers that one failure took out: the median."""
    pause_s: float | None
    """What a failure cost the others: the median."""
    replace_s: float | None
    """From a failure until all slots were filled again: the median."""


def measure(run: Run) -> Measured:
    """Return the figures of a run, which may still be going on."""
    commits = max(run.commits.values(), key=len, default=())
    faults = [line for line in run.journal if line.get("outcome") == "Fault"]
    written = [float(line["seconds"]) for line in run.journal if line.get("event") == "CheckpointWritten"]
    costs = [cost.lost_s for cost in fault_costs(run) if cost.lost_s is not None]
    times = [commit.time for commit in commits]
    all_times = [commit.time for each in run.commits.values() for commit in each]
    return Measured(
        workers=_last(run, "LighthouseStarted", "slots"),
        microbatches=len(commits[-1].plan) if commits else None,
        elapsed_s=max(all_times) - min(all_times) if all_times else 0.0,
        step_s=_median([later - earlier for earlier, later in itertools.pairwise(times)]),
        checkpoint_s=_median(written),
        stall_s=_last(run, "IntervalChosen", "cost_s"),
        failures=len(faults),
        lost_workers=round(_median([len(line["worker_ids"]) for line in faults]) or 1) if faults else None,
        pause_s=_median(costs),
        replace_s=_median(list(_replacements(run))),
    )


def _replacements(run: Run) -> Iterator[float]:
    """Yield the time from each fault to the first generation with all slots filled, where there was one."""
    places = _last(run, "LighthouseStarted", "slots")
    full: set[int] = set()
    faults: list[float] = []
    for line in run.journal:
        if line.get("outcome") == "Fault":
            faults.append(line["time"])
        elif line.get("action") in ("Propose", "Reconfigure") and len(line["members"]) == places:
            full.add(line["generation"])
        elif line.get("event") == "GenerationEntered" and line["generation"] in full:
            yield from (line["time"] - fault for fault in faults)
            faults = []


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _last(run: Run, event: str, field: str) -> Any:
    found = [line[field] for line in run.journal if line.get("event") == event and line.get(field) is not None]
    return found[-1] if found else None
