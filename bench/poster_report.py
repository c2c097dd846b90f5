"""The figures of ``bench/poster.py`` against their bars."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from bench.stats import ratio_of_medians
from bench.verdict import Check, Summary

MIN_TRIALS = 20
BEYOND_STEP_MS = (75.0, 300.0)
"""Of CRAFT, median and worst after a SIGKILL; ``bench/recovery.py`` has the same bars."""
RATIOS = (
    ("torchft", "torchft-under-craft", "SIGKILL", 6.1),
    ("torchft", "torchft-under-craft", "hang", 6.1),
    ("checkpoint-restart", "craft", "SIGKILL", 21.0),
    ("torchft", "craft", "SIGKILL", 40.0),
)
"""(slower, faster, fault, how many times at least)."""
NAMES = {
    "checkpoint-restart": "checkpoint-restart (torchrun)",
    "torchft": "torchft (README)",
    "torchft-tuned": "torchft tuned",
    "torchft-under-craft": "torchft under CRAFT",
    "craft-lightning": "CRAFT with Lightning",
    "craft": "CRAFT",
}


def summarize_poster(result: dict[str, Any]) -> Summary:
    figures: dict[str, Any] = {}
    rows = []
    for system, name in NAMES.items():
        for fault in ("SIGKILL", "hang"):
            found = [t for t in result["trials"] if (t["system"], t["fault"]) == (system, fault)]
            if not found:
                continue
            times = sorted(t["recovery_s"] for t in found)
            step_s = statistics.median(t["step_s"] for t in found)
            beyond = [t["recovery_s"] - t["step_s"] for t in found]
            figures.setdefault(system, {})[fault] = {
                "recovery_s": times, "median_s": statistics.median(times), "step_s": step_s, "beyond_step_s": beyond,
            }  # fmt: skip
            low, high = (times[round(share * (len(times) - 1))] for share in (0.1, 0.9))
            spread = (f"{1e3 * low:.0f}-{1e3 * high:.0f}", f"{1e3 * times[0]:.0f}-{1e3 * times[-1]:.0f}")
            median = f"{1e3 * statistics.median(times):.0f}"
            rows.append((name, fault, str(len(found)), f"{1e3 * step_s:.1f}", median, *spread))
    return Summary(
        title=_title(result["settings"]["workers"], result["limits"]),
        header=("system", "fault", "trials", "step", "median", "10-90%", "min-max"),
        rows=tuple(rows),
        checks=tuple(_ratios(figures) + _bars(figures) + _counts(figures)),
        figures=figures,
    )


def _title(workers: int, limits: dict[str, Any]) -> str:
    return (
        f"From a fault of one of {workers} workers to the next step past what was reached (ms). A hang is SIGSTOP.\n"
        f"checkpoint-restart: a save every {limits['save_every']} steps. It finds a hang by a limit of"
        f" {limits['group_timeout_s']} s on collectives (torch's default: 30 min);\ntorchrun then waits 30 s for the stopped"
        f" worker to end by SIGTERM. torchft tuned: {limits['tuned_ms']} ms"
        " for heartbeats and collectives.\nCRAFT: all defaults; a stopped worker is lost after 0.5 s."
    )


def _ratios(figures: dict[str, Any]) -> list[Check]:
    checks = []
    for slower, faster, fault, least in RATIOS:
        slow, fast = (figures.get(system, {}).get(fault) for system in (slower, faster))
        if slow is None or fast is None:
            continue
        ratio = ratio_of_medians(slow["recovery_s"], fast["recovery_s"])
        slow.setdefault("ratios", {})[faster] = asdict(ratio)
        measured = f"{ratio.value:.1f} times faster (95% {ratio.low:.1f}-{ratio.high:.1f})"
        what = f"{NAMES[faster]} against {NAMES[slower]}, {fault}"
        checks.append(Check(what, measured, f"at least {least:g}", ratio.value >= least))
    return checks


def _bars(figures: dict[str, Any]) -> list[Check]:
    """CRAFT's own bars; with Lightning one step more."""
    checks = []
    for system, steps in (("craft", 0), ("craft-lightning", 1)):
        found = figures.get(system, {}).get("SIGKILL")
        if found is None:
            continue
        step_ms = 1e3 * found["step_s"]
        measured = [1e3 * statistics.median(found["beyond_step_s"]), 1e3 * max(found["beyond_step_s"])]
        more = f" and one step of {step_ms:.1f} ms" if steps else ""
        for name, value, bar in zip(("median", "worst"), measured, BEYOND_STEP_MS, strict=True):
            what = f"{NAMES[system]}, {name} beyond one undisturbed step, SIGKILL"
            passed = value <= bar + steps * step_ms
            checks.append(Check(what, f"{value:.1f} ms", f"at most {bar:.0f} ms{more}", passed))
    return checks


def _counts(figures: dict[str, Any]) -> list[Check]:
    counts = [len(found["recovery_s"]) for faults in figures.values() for found in faults.values()]
    fewest = min(counts, default=0) if len(counts) == 2 * len(NAMES) else 0
    return [Check("trials of each system and fault", str(fewest), f"at least {MIN_TRIALS}", fewest >= MIN_TRIALS)]
