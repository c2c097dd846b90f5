"""The figures of ``bench/alerts.py`` against their bars."""

from __future__ import annotations

import statistics
from typing import Any

from bench.verdict import Check, Summary

MAX_FREED_MS = 50.0
MIN_TRIALS = 20


def summarize_alerts(result: dict[str, Any]) -> Summary:
    trials: list[dict[str, float]] = result["trials"]
    rows, figures = [], {}
    what = {
        "answered_s": "the answer",
        "first_s": "the first worker is out of the exchange",
        "freed_s": "the last worker is out of the exchange",
        "acting_s": "all act under the new generation",
    }
    for key, words in what.items():
        found = [1e3 * trial[key] for trial in trials]
        figures[key] = {"median_ms": statistics.median(found), "min_ms": min(found), "max_ms": max(found)}
        rows.append((words, str(len(found)), f"{statistics.median(found):.1f}", f"{min(found):.1f}-{max(found):.1f}"))
    theirs = [1e3 * each for each in result["torchft"]]
    rows.append(("torchft, from a SIGKILL", str(len(theirs)), f"{statistics.median(theirs):.0f}", _spread(theirs)))
    freed = figures["freed_s"]
    checks = (
        Check(
            "from the POST to the last of 4 workers freed",
            f"median {freed['median_ms']:.1f} ms, worst {freed['max_ms']:.1f} ms",
            f"below {MAX_FREED_MS:g} ms",
            freed["max_ms"] < MAX_FREED_MS,
        ),
        Check("trials", str(len(trials)), f"at least {MIN_TRIALS}", len(trials) >= MIN_TRIALS),
    )
    return Summary(
        title="An alert frees 4 workers that wait in an exchange for a fifth (ms, from the POST)",
        header=("until", "trials", "median", "min-max"),
        rows=tuple(rows),
        checks=checks,
        figures=figures,
    )


def _spread(values: list[float]) -> str:
    return f"{min(values):.0f}-{max(values):.0f}"
