"""The figures of ``bench/healing.py`` against their bars."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from bench.stats import ratio_of_medians
from bench.verdict import Check, Summary

MAX_REPLACEMENT_S = 1.0
MIN_RATIO_TO_TORCHFT = 3.0
MAX_STEP_BEYOND_S = 0.150
MAX_STOPPED_S = 1.5
MAX_SPARE_S = 0.300
MAX_STEPS_AROUND_A_KILL = 2.0


def summarize_healing(result: dict[str, Any]) -> Summary:
    measured: dict[str, list[dict[str, Any]]] = result["measured"]
    rows, figures = [], {}
    for name, found in measured.items():
        if name == "lighthouse":
            continue
        totals = [each["total_s"] for each in found]
        step = f"{1e3 * statistics.median(each['step_s'] for each in found):.0f}" if "step_s" in found[0] else "-"
        figures[name] = {
            "count": len(found),
            "median_s": statistics.median(totals),
            "min_s": min(totals),
            "max_s": max(totals),
        }
        spread = f"{1e3 * min(totals):.0f}-{1e3 * max(totals):.0f}"
        rows.append((WHAT[name], str(len(found)), step, f"{1e3 * statistics.median(totals):.0f}", spread))
    checks = [check for make in (_replacement, _stopped, _spare, _lighthouse) for check in make(measured, figures)]
    return Summary(
        title="Healing: 3 workers, 6 microbatches (ms)",
        header=("from", "jobs", "step", "median", "min-max"),
        rows=tuple(rows),
        checks=tuple(checks),
        figures=figures,
    )


WHAT = {
    "replacement": "SIGKILL to the first commit of the replacement, 200 MB",
    "torchft": "the same, torchft",
    "stopped": "SIGSTOP to the survivors' next commit",
    "spare": "SIGKILL to the next commit with a spare in the slot, 50 MB",
}


def _replacement(measured: dict[str, list[dict[str, Any]]], figures: dict[str, Any]) -> list[Check]:
    found = measured.get("replacement", [])
    if not found:
        return []
    beyond = [each["total_s"] - each["script_s"] for each in found]
    longest = [each["longest_step_s"] - 2 * each["step_s"] for each in found]
    checks = [
        Check(
            "SIGKILL to the replacement's first commit, beyond the script's own start-up",
            f"median {statistics.median(beyond):.3f} s, worst {max(beyond):.3f} s",
            f"at most {MAX_REPLACEMENT_S:g} s",
            max(beyond) <= MAX_REPLACEMENT_S,
        ),
        Check(
            "longest step of a survivor while it joins, beyond two undisturbed ones",
            f"median {1e3 * statistics.median(longest):.0f} ms, worst {1e3 * max(longest):.0f} ms",
            f"at most {1e3 * MAX_STEP_BEYOND_S:.0f} ms",
            max(longest) <= MAX_STEP_BEYOND_S,
        ),
    ]
    if measured.get("torchft"):
        ratio = ratio_of_medians([e["total_s"] for e in measured["torchft"]], [e["total_s"] for e in found])
        figures["replacement"]["ratio_to_torchft"] = asdict(ratio)
        text = f"{ratio.value:.1f} (95% {ratio.low:.1f}-{ratio.high:.1f})"
        bar = f"at least {MIN_RATIO_TO_TORCHFT:g}"
        checks.append(
            Check("replacement by torchft over CRAFT's, medians", text, bar, ratio.value >= MIN_RATIO_TO_TORCHFT)
        )
    return checks


def _limit(measured: dict[str, list[dict[str, Any]]], name: str, limit_s: float) -> list[Check]:
    totals = [each["total_s"] for each in measured.get(name, [])]
    if not totals:
        return []
    text = f"median {statistics.median(totals):.3f} s, worst {max(totals):.3f} s"
    return [Check(WHAT[name], text, f"at most {limit_s:g} s", max(totals) <= limit_s)]


def _stopped(measured: dict[str, list[dict[str, Any]]], figures: dict[str, Any]) -> list[Check]:
    return _limit(measured, "stopped", MAX_STOPPED_S)


def _spare(measured: dict[str, list[dict[str, Any]]], figures: dict[str, Any]) -> list[Check]:
    return _limit(measured, "spare", MAX_SPARE_S)


def _lighthouse(measured: dict[str, list[dict[str, Any]]], figures: dict[str, Any]) -> list[Check]:
    if not measured.get("lighthouse"):
        return []
    (found,) = measured["lighthouse"]
    ratios = [around / found["step_s"] for around in found["around_s"]]
    before = [each / found["step_s"] for each in found["before_s"]]
    figures["lighthouse"] = {
        "worst": max(ratios),
        "median": statistics.median(ratios),
        "worst_before": max(before),
        "median_before": statistics.median(before),
    }
    text = (
        f"{len(ratios)} kills: longest step within a second of one, over the median step: median"
        f" {statistics.median(ratios):.2f}, worst {max(ratios):.2f}; within the second before: median"
        f" {statistics.median(before):.2f}, worst {max(before):.2f}"
    )
    return [
        Check(
            "steps while the lighthouse is killed",
            text,
            f"at most {MAX_STEPS_AROUND_A_KILL:g}, or no longer than without a kill",
            max(ratios) <= max(MAX_STEPS_AROUND_A_KILL, max(before)),
        ),
        Check("generations made meanwhile", str(found["generation"]), "1", found["generation"] == 1),
    ]
