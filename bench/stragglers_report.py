"""The figures of ``bench/stragglers.py`` against their bars."""

from __future__ import annotations

import statistics
from typing import Any

from bench.verdict import Check, Summary

MAX_FOUND_AFTER = 20
MIN_RECOVERED = 0.70
MIN_NOISY_STEPS = 10_000


def summarize_stragglers(result: dict[str, Any]) -> Summary:
    rows: list[tuple[str, ...]] = []
    checks: list[Check] = []
    figures: dict[str, Any] = {"cost_us": result["cost_us"]}
    for way in dict.fromkeys(each["way"] for each in result["trials"]):
        trials = [each for each in result["trials"] if each["way"] == way]
        told, moved = ([each for each in trials if each["answer"] == answer] for answer in ("report", "rebalance"))
        victims = {each["victim"]: each for each in told}
        recovered = [_recovered(victims[each["victim"]], each) for each in moved if each["victim"] in victims]
        figures[way] = {"recovered": recovered, "found_after": [each["found_after"] for each in trials]}
        rows += [
            _row(f"{way}: step, nobody slow (ms)", [1e3 * each["usual_s"] for each in trials]),
            _row(f"{way}: step, one slow, told of (ms)", [1e3 * each["slow_s"] for each in told]),
            _row(f"{way}: step, one slow, microbatches moved (ms)", [1e3 * each["slow_s"] for each in moved]),
            _row(f"{way}: recovered (%)", [100 * each for each in recovered]),
            _row(f"{way}: found after (steps)", [each["found_after"] for each in trials]),
            _row(f"{way}: a microbatch there, times as long as before", [each["slowed"] for each in trials]),
            _row(f"{way}: a microbatch there, times as long as elsewhere", [each["ratio"] for each in trials]),
        ]
        checks += _checks(way, trials, recovered)
    for number, cost in result["cost_us"].items():
        rows.append(
            (f"judging a step, {number} workers (us)", "", f"{cost['usual']:.1f}", f"{cost['slow']:.1f} if slow")
        )
    return Summary(
        title="One worker of 4 becomes three times as slow; 16 microbatches",
        header=("", "jobs", "median", "min-max"),
        rows=tuple(rows),
        checks=(*checks, *_alarms(result["noisy"])),
        figures=figures,
    )


def _recovered(told: dict[str, Any], moved: dict[str, Any]) -> float:
    """How much of what the slow worker cost comes back by moving microbatches."""
    usual = (told["usual_s"] + moved["usual_s"]) / 2
    return float((told["slow_s"] - moved["slow_s"]) / (told["slow_s"] - usual))


def _row(what: str, values: list[float]) -> tuple[str, ...]:
    if not values:
        return (what, "0", "", "")
    return (what, str(len(values)), f"{statistics.median(values):.3g}", f"{min(values):.3g}-{max(values):.3g}")


def _checks(way: str, trials: list[dict[str, Any]], recovered: list[float]) -> list[Check]:
    after = max(each["found_after"] for each in trials)
    digests = {digest for each in trials for digest in each["digests"]}
    share = statistics.median(recovered) if recovered else 0.0
    spread = f"{min(recovered):.0%} to {max(recovered):.0%}" if recovered else "no pair of jobs"
    return [
        Check(
            f"{way}: found after, at worst", f"{after} steps", f"at most {MAX_FOUND_AFTER}", after <= MAX_FOUND_AFTER
        ),
        Check(
            f"{way}: of the cost recovered",
            f"median {share:.0%}, {spread}",
            f"median at least {MIN_RECOVERED:.0%}",
            share >= MIN_RECOVERED,
        ),
        Check(f"{way}: final states of all jobs", f"{len(digests)} different", "1", len(digests) == 1),
    ]


def _alarms(noisy: dict[str, Any] | None) -> list[Check]:
    if noisy is None:
        return []
    pace = f"{noisy['step_ms']:.3g} ms (1% above {noisy['step_ms_99']:.3g})"
    measured = f"{len(noisy['alarms'])} in {noisy['steps']} steps of {pace}"
    passed = not noisy["alarms"] and noisy["steps"] >= MIN_NOISY_STEPS
    return [Check("false alarms beside other programs", measured, f"0 in {MIN_NOISY_STEPS}", passed)]
