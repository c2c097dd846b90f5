"""The figures of ``bench/checkpoints.py`` against their bars."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from bench.stats import Estimate, paired_ratio
from bench.verdict import Check, Summary

MAX_STALL_OVER_MEMCPY = 1.5
MIN_WRITE_OVER_DD = 0.8
MIN_RESTORE_OVER_READ = 0.8

NAMES = {
    "craft": "CRAFT",
    "torch_save": "torch.save",
    "dcp": "torch.distributed.checkpoint.async_save",
    "memcpy": "memcpy of a worker's share",
}


def summarize_checkpoints(result: dict[str, Any]) -> Summary:
    saves: dict[str, list[dict[str, float]]] = result["saves"]
    rows, figures = [], {}
    for system, name in NAMES.items():
        stalls = [each["stall_s"] * 1e3 for each in saves[system]]
        written = sum(each["bytes"] for each in saves[system]) / 1e9
        figures[system] = {"stall_ms": statistics.median(stalls), "written_gb": written}
        spread = f"{min(stalls):.1f}-{max(stalls):.1f}"
        shown = "-" if system == "memcpy" else f"{written:.2f}"
        rows.append((name, str(len(stalls)), f"{statistics.median(stalls):.1f}", spread, shown))
    disk: dict[str, list[dict[str, float]]] = result["disk"]
    figures |= {name: {"mb_s": _speed(found)} for name, found in disk.items()}
    checks = _stall_checks(saves, figures) + _disk_checks(disk, figures)
    return Summary(
        title=f"{result['settings']['rounds']} checkpoints of a half-frozen state by 2 workers: how long a step is held up (ms)",
        header=("system", "checkpoints", "stall, median", "min-max", "written in all (GB)"),
        rows=tuple(rows),
        checks=tuple(checks),
        figures=figures,
    )


def _speed(found: list[dict[str, float]]) -> float:
    return statistics.median(each["bytes"] / each["seconds"] / 1e6 for each in found)


def _median_ratio(pairs: list[tuple[float, float]]) -> Estimate:
    return paired_ratio(pairs, lambda drawn: statistics.median(over / under for over, under in drawn))


def _stall_checks(saves: dict[str, list[dict[str, float]]], figures: dict[str, Any]) -> list[Check]:
    stalls = {system: [each["stall_s"] for each in found] for system, found in saves.items()}
    ratio = _median_ratio(list(zip(stalls["craft"], stalls["memcpy"], strict=True)))
    figures["craft"]["stall_over_memcpy"] = asdict(ratio)
    measured = f"{ratio.value:.2f} (95% {ratio.low:.2f}-{ratio.high:.2f})"
    what = "stall of CRAFT over a memcpy of the share, median of rounds"
    checks = [Check(what, measured, f"at most {MAX_STALL_OVER_MEMCPY}", ratio.value <= MAX_STALL_OVER_MEMCPY)]
    for other in ("torch_save", "dcp"):
        ratio = _median_ratio(list(zip(stalls[other], stalls["craft"], strict=True)))
        figures[other]["stall_over_craft"] = asdict(ratio)
        measured = f"{ratio.value:.1f} (95% {ratio.low:.1f}-{ratio.high:.1f})"
        checks.append(Check(f"stall of {NAMES[other]} over CRAFT's", measured, "above 1", ratio.value > 1))
        times = figures[other]["written_gb"] / figures["craft"]["written_gb"]
        checks.append(Check(f"bytes written by {NAMES[other]} over CRAFT's", f"{times:.2f}", "above 1", times > 1))
    return checks


def _disk_checks(disk: dict[str, list[dict[str, float]]], figures: dict[str, Any]) -> list[Check]:
    checks = []
    for ours, theirs, least, what in (
        ("write", "dd", MIN_WRITE_OVER_DD, "writing over dd with fsync, 2 writers each"),
        ("restore", "read", MIN_RESTORE_OVER_READ, "restoring over reading the files"),
    ):
        if not disk[ours]:
            continue
        speeds = [[each["bytes"] / each["seconds"] for each in disk[name]] for name in (ours, theirs)]
        ratio = _median_ratio(list(zip(*speeds, strict=True)))
        figures[ours][f"over_{theirs}"] = asdict(ratio)
        medians = f"{figures[ours]['mb_s']:.0f} against {figures[theirs]['mb_s']:.0f} MB/s"
        measured = f"{ratio.value:.2f} (95% {ratio.low:.2f}-{ratio.high:.2f}; {medians})"
        checks.append(Check(what, measured, f"at least {least}", ratio.value >= least))
    return checks
