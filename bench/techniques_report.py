"""The figures of ``bench/techniques.py`` against their bar."""

from __future__ import annotations

import statistics
from typing import Any

from bench.stats import paired_ratio
from bench.verdict import Check, Summary

MAX_MS = 0.3


def summarize_techniques(result: dict[str, Any]) -> Summary:
    costs: dict[str, list[list[float]]] = result["costs"]
    on, off = ([1e3 * statistics.fmean(job) for job in costs[kind]] for kind in ("on", "off"))
    # Jobs of one round run next to each other: what the machine does to both cancels.
    difference = paired_ratio(
        list(zip(on, off, strict=False)), lambda pairs: statistics.median(a - b for a, b in pairs)
    )
    rows = [
        (words, str(len(found)), f"{statistics.median(found):.3f}", f"{min(found):.3f}-{max(found):.3f}")
        for words, found in (("all techniques on", on), ("all off", off))
    ]
    check = Check(
        "processor time of all techniques, per step and worker",
        f"{difference.value:.3f} ms (95% {difference.low:.3f} to {difference.high:.3f})",
        f"at most {MAX_MS:g} ms",
        difference.value <= MAX_MS,
    )
    return Summary(
        title="Processor time per step and worker (ms), jobs of 4 workers in turns",
        header=("jobs", "number", "median", "min-max"),
        rows=tuple(rows),
        checks=(check,),
        figures={"difference_ms": difference.value, "low_ms": difference.low, "high_ms": difference.high},
    )
