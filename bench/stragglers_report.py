"""The figures of ``bench/stragglers.py`` against their bars."""

from __future__ import annotations

import statistics
from typing import Any

from bench.verdict import Check, Summary

MAX_FOUND_AFTER = 20
MIN_RECOVERED = 0.70
MIN_NOISY_STEPS = 10_000


def summarize_stragglers(result: dict[str, Any]) -> Summary:
    told = [trial for trial in result["trials"] if trial["answer"] == "report"]
    moved = [trial for trial in result["trials"] if trial["answer"] == "rebalance"]
    pairs = [(a, b) for a in told for b in moved if a["victim"] == b["victim"] and told.index(a) == moved.index(b)]
    recovered = [_recovered(a, b) for a, b in pairs]
    rows = [
        _row("step, nobody slow (ms)", [1e3 * each["usual_s"] for each in result["trials"]]),
        _row("step, one slow, told of (ms)", [1e3 * each["slow_s"] for each in told]),
        _row("step, one slow, microbatches moved (ms)", [1e3 * each["slow_s"] for each in moved]),
        _row("recovered (%)", [100 * each for each in recovered]),
        _row("found after (steps)", [each["found_after"] for each in result["trials"]]),
        _row("as many times as slow, as measured", [each["ratio"] for each in result["trials"]]),
    ]
    for number, cost in result["cost_us"].items():
        rows.append(
            (f"judging a step, {number} workers (us)", "", f"{cost['usual']:.1f}", f"{cost['slow']:.1f} if slow")
        )
    figures = {
        "recovered": recovered,
        "found_after": [each["found_after"] for each in result["trials"]],
        "cost_us": result["cost_us"],
    }
    return Summary(
        title="One worker of 4 runs a third of the time; 16 microbatches",
        header=("", "jobs", "median", "min-max"),
        rows=tuple(rows),
        checks=tuple(_checks(result, recovered)),
        figures=figures,
    )


def _recovered(told: dict[str, Any], moved: dict[str, Any]) -> float:
    """How much of what the slow worker cost comes back by moving microbatches."""
    usual = (told["usual_s"] + moved["usual_s"]) / 2
    return float((told["slow_s"] - moved["slow_s"]) / (told["slow_s"] - usual))


def _row(what: str, values: list[float]) -> tuple[str, ...]:
    return (what, str(len(values)), f"{statistics.median(values):.3g}", f"{min(values):.3g}-{max(values):.3g}")


def _checks(result: dict[str, Any], recovered: list[float]) -> list[Check]:
    after = [each["found_after"] for each in result["trials"]]
    digests = {digest for each in result["trials"] for digest in each["digests"]}
    checks = [
        Check(
            "found after, at worst", f"{max(after)} steps", f"at most {MAX_FOUND_AFTER}", max(after) <= MAX_FOUND_AFTER
        ),
        Check(
            "of the cost recovered",
            f"median {statistics.median(recovered):.0%}, {min(recovered):.0%} to {max(recovered):.0%}",
            f"median at least {MIN_RECOVERED:.0%}",
            statistics.median(recovered) >= MIN_RECOVERED,
        ),
        Check("final states of all jobs", f"{len(digests)} different", "1", len(digests) == 1),
    ]
    noisy = result["noisy"]
    if noisy is not None:
        pace = f"{noisy['step_ms']:.3g} ms (1% above {noisy['step_ms_99']:.3g})"
        measured = f"{len(noisy['alarms'])} in {noisy['steps']} steps of {pace}"
        passed = not noisy["alarms"] and noisy["steps"] >= MIN_NOISY_STEPS
        checks.append(Check("false alarms beside other programs", measured, f"0 in {MIN_NOISY_STEPS}", passed))
    return checks
