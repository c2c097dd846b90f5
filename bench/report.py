"""Turns the raw figures of a benchmark into JSON, a text table, a chart and a verdict against the bars.

The benchmarks call ``finish``. ``python bench/report.py bench/results/recovery.json`` writes them anew from the raw figures
in such a file.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.alerts_report import summarize_alerts
from bench.checkpoints_report import summarize_checkpoints
from bench.completion_chart import draw_completion
from bench.completion_report import summarize_completion
from bench.fuzz_report import summarize_fuzz
from bench.healing_report import summarize_healing
from bench.lightning_report import summarize_lightning
from bench.poster_report import summarize_poster
from bench.sharded_report import summarize_sharded_overhead, summarize_sharded_recovery
from bench.stats import Estimate, paired_ratio, ratio_of_means, ratio_of_medians, trimmed_ratio
from bench.stragglers_report import summarize_stragglers
from bench.techniques_report import summarize_techniques
from bench.verdict import Check, Summary

MEDIAN_BEYOND_STEP_MS = 75.0
WORST_BEYOND_STEP_MS = 300.0
MIN_KILLS = 20
RATIO_TO_TORCHFT = {"torchft": 40.0, "torchft-tuned": 4.0}
MAX_OVERHEAD = 1.04
MAX_OVERHEAD_OF_TRAINERS = 1.03
MIN_TRANSFER_GB_S = 1.0
MIN_TRANSFER_RATIO = 2.5
CHARTS = ("recovery", "overhead", "poster")


def environment() -> dict[str, Any]:
    """Return what one must know about the machine to read the figures."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "torchft-nightly", "craft")}
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        **versions,
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def summarize_recovery(result: dict[str, Any]) -> Summary:
    kills: dict[str, list[dict[str, float]]] = {system: rows for system, rows in result["kills"].items() if rows}
    figures: dict[str, Any] = {}
    rows = []
    for system, found in kills.items():
        times = [kill["recovery_s"] for kill in found]
        beyond = [kill["recovery_s"] - kill["step_s"] for kill in found]
        step_s = statistics.median(kill["step_s"] for kill in found)
        figures[system] = {
            "kills": len(found),
            "step_s": step_s,
            "recovery_s": {"median": statistics.median(times), "min": min(times), "max": max(times)},
            "beyond_step_s": {"median": statistics.median(beyond), "min": min(beyond), "max": max(beyond)},
        }
        rows.append(
            (
                system,
                str(len(found)),
                _ms(step_s),
                _ms(statistics.median(times)),
                f"{_ms(min(times))}-{_ms(max(times))}",
                _ms(statistics.median(beyond)),
                _ms(max(beyond)),
            )
        )
    checks = _craft_checks(result, figures) + _ratio_checks(kills, figures) if "craft" in kills else []
    settings = result["settings"]
    return Summary(
        title=f"Recovery from SIGKILL of one of {settings['workers']} workers, {settings['microbatches']} microbatches "
        "(ms, from the signal to the survivors' first commit of a newer generation)",
        header=("system", "kills", "step", "recovery median", "min-max", "beyond one step, median", "worst"),
        rows=tuple(rows),
        checks=tuple(checks),
        figures=figures,
    )


def _craft_checks(result: dict[str, Any], figures: dict[str, Any]) -> list[Check]:
    craft = figures["craft"]
    median_ms, worst_ms = craft["beyond_step_s"]["median"] * 1e3, craft["beyond_step_s"]["max"] * 1e3
    step_ms = craft["step_s"] * 1e3
    return [
        Check(
            "median recovery beyond one undisturbed step",
            f"{median_ms:.1f} ms",
            f"at most {MEDIAN_BEYOND_STEP_MS:.0f} ms",
            median_ms <= MEDIAN_BEYOND_STEP_MS,
        ),
        Check(
            "worst recovery beyond one undisturbed step",
            f"{worst_ms:.1f} ms",
            f"at most {WORST_BEYOND_STEP_MS:.0f} ms",
            worst_ms <= WORST_BEYOND_STEP_MS,
        ),
        Check("kills of CRAFT jobs", str(craft["kills"]), f"at least {MIN_KILLS}", craft["kills"] >= MIN_KILLS),
        Check("undisturbed CRAFT step", f"{step_ms:.1f} ms", "30-40 ms", 30 <= step_ms <= 40),
    ]


def _ratio_checks(kills: dict[str, list[dict[str, float]]], figures: dict[str, Any]) -> list[Check]:
    checks = []
    times = {system: [kill["recovery_s"] for kill in found] for system, found in kills.items()}
    for system, least in RATIO_TO_TORCHFT.items():
        if system not in times:
            continue
        ratio = ratio_of_medians(times[system], times["craft"])
        figures[system]["ratio_to_craft"] = asdict(ratio)
        worst, best = min(times[system]) / max(times["craft"]), max(times[system]) / min(times["craft"])
        measured = f"{ratio.value:.1f} (95% {ratio.low:.1f}-{ratio.high:.1f}; single kills {worst:.1f}-{best:.1f})"
        checks.append(
            Check(
                f"recovery of {system} over CRAFT's, medians", measured, f"at least {least:.0f}", ratio.value >= least
            )
        )
    return checks


def summarize_overhead(result: dict[str, Any], bar: float = MAX_OVERHEAD) -> Summary:
    rows, checks = [], []
    figures: dict[str, Any] = {}
    for cell in result["cells"]:
        name = f"{cell['workers']} workers, {cell['step_ms']:.0f} ms"
        figures[name] = {}
        for system, blocks in cell["blocks"].items():
            if not blocks:
                continue
            pairs = [(block["system_s"], block["ddp_s"]) for block in blocks]
            ratio, means = paired_ratio(pairs, trimmed_ratio), paired_ratio(pairs, ratio_of_means)
            step_s = statistics.median(ddp_s for _, ddp_s in pairs) / result["settings"]["steps_per_block"]
            figures[name][system] = {"ratio": asdict(ratio), "ratio_of_means": asdict(means), "ddp_step_s": step_s}
            rows.append((name, system, str(len(pairs)), _ms(step_s), _interval(ratio), _interval(means)))
            if system == "craft":
                measured = f"upper 95% limit {ratio.high:.3f}, estimate {ratio.value:.3f}"
                what = f"CRAFT step over DDP's, {name}"
                checks.append(Check(what, measured, f"at most {bar}", ratio.high <= bar))
    return Summary(
        title="Failure-free step against DistributedDataParallel over Gloo, alternating blocks in the same processes",
        header=("job", "system", "block pairs", "DDP step (ms)", "ratio (95%)", "ratio of means (95%)"),
        rows=tuple(rows),
        checks=tuple(checks),
        figures=figures,
    )


def summarize_huggingface(result: dict[str, Any]) -> Summary:
    title = "Failure-free step of CraftTrainer against Hugging Face's Trainer under torchrun, over Gloo, in alternating blocks"
    return replace(summarize_overhead(result, MAX_OVERHEAD_OF_TRAINERS), title=title)


def summarize_transfer(result: dict[str, Any]) -> Summary:
    speeds: dict[str, list[float]] = {}
    figures: dict[str, Any] = {}
    rows = []
    for system, found in result["transfers"].items():
        speeds[system] = [each["bytes"] / each["transfer_s"] / 1e9 for each in found]
        medians = {
            name: statistics.median(each[name] for each in found)
            for name in ("bytes", "transfer_s", "stage_s", "load_s", "sender_cpu_s", "receiver_cpu_s")
        }
        figures[system] = {"gb_s": _spread(speeds[system]), **medians}
        low, high = min(speeds[system]), max(speeds[system])
        cpu_s = (medians[f"{side}_cpu_s"] / medians["bytes"] * 1e9 for side in ("sender", "receiver"))
        times = (_ms(medians[name]) for name in ("stage_s", "load_s"))
        speed = f"{statistics.median(speeds[system]):.2f}"
        rows.append(
            (system, str(len(found)), speed, f"{low:.2f}-{high:.2f}", *times, *(f"{each:.2f}" for each in cpu_s))
        )
    for reserved in (False, True):
        found = [each for each in result["transfers"]["craft"] if each["reserved"] == reserved]
        if found:
            staged = [each["bytes"] / each["stage_s"] / 1e9 for each in found]
            figures["stage, memory reserved" if reserved else "stage, memory fresh"] = {"gb_s": _spread(staged)}
    return Summary(
        title=f"State of {figures['craft']['bytes'] / 1e9:.2f} GB from one process to another over loopback",
        header=(
            "system",
            "transfers",
            "GB/s, median",
            "min-max",
            "stage (ms)",
            "load (ms)",
            "sender CPU s/GB",
            "receiver",
        ),
        rows=tuple(rows),
        checks=tuple(_transfer_checks(speeds, figures)),
        figures=figures,
    )


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _transfer_checks(speeds: dict[str, list[float]], figures: dict[str, Any]) -> list[Check]:
    median = statistics.median(speeds["craft"])
    ratio = ratio_of_medians(speeds["craft"], speeds["torchft"])
    figures["craft"]["ratio_to_torchft"] = asdict(ratio)
    what = "speed of CRAFT, one stripe, checked and authenticated"
    return [
        Check(what, f"{median:.2f} GB/s", f"at least {MIN_TRANSFER_GB_S:.1f} GB/s", median >= MIN_TRANSFER_GB_S),
        Check(
            "speed of CRAFT over torchft's HTTP transport, medians",
            f"{ratio.value:.2f} (95% {ratio.low:.2f}-{ratio.high:.2f})",
            f"at least {MIN_TRANSFER_RATIO}",
            ratio.value >= MIN_TRANSFER_RATIO,
        ),
    ]


def _failure_checks(result: dict[str, Any]) -> list[Check]:
    """A job of CRAFT that did not come through weighs more than any figure; one of torchft is only told."""
    systems = [failure["system"] for failure in result["failed"]]
    told = ", ".join(f"{system} {systems.count(system)}" for system in sorted(set(systems))) or "none"
    return [Check("jobs that failed", told, "none of CRAFT", not any("craft" in system for system in systems))]


def _interval(ratio: Estimate) -> str:
    return f"{ratio.value:.3f} ({ratio.low:.3f}-{ratio.high:.3f})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the rows under their header, in columns: the first to the left, figures to the right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def show(line: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if n else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([show(header), "  ".join("-" * width for width in widths), *map(show, rows)])


def finish(result: dict[str, Any], out: Path) -> int:
    """Write ``<benchmark>.json``, ``.txt`` and ``.png`` under ``out``, print the verdict, and return an exit status."""
    name = result["benchmark"]
    summarize = {
        "recovery": summarize_recovery,
        "overhead": summarize_overhead,
        "huggingface_overhead": summarize_huggingface,
        "transfer": summarize_transfer,
        "healing": summarize_healing,
        "checkpoints": summarize_checkpoints,
        "alerts": summarize_alerts,
        "fuzz_http": summarize_fuzz,
        "techniques": summarize_techniques,
        "stragglers": summarize_stragglers,
        "lightning_overhead": summarize_lightning,
        "poster": summarize_poster,
        "completion": summarize_completion,
        "sharded_recovery": summarize_sharded_recovery,
        "sharded_overhead": summarize_sharded_overhead,
    }
    summary = summarize[name](result)
    summary = replace(summary, checks=(*summary.checks, *_failure_checks(result)))
    out.mkdir(parents=True, exist_ok=True)
    whole = {**result, "summary": summary.figures, "checks": [asdict(check) for check in summary.checks]}
    (out / f"{name}.json").write_text(json.dumps(whole, indent=1, default=str) + "\n")
    machine = ", ".join(f"{key} {value}" for key, value in result["environment"].items())
    text = "\n".join(
        [
            summary.title,
            "",
            table(summary.header, summary.rows),
            "",
            *map(str, summary.checks),
            "",
            f"Machine: {machine}",
        ]
    )
    (out / f"{name}.txt").write_text(text + "\n")
    if name == "completion":
        draw_completion(result, summary.figures, out / f"{name}.svg")
    if name in CHARTS:
        # Only now: what draws need not be there for those without a chart.
        from bench import charts

        getattr(charts, f"draw_{name}")(result, summary.figures, out / f"{name}.png")
    print(text)
    return 0 if all(check.passed for check in summary.checks) else 1


def main() -> int:
    if len(sys.argv) != 2:
        print(f"usage: {sys.argv[0]} RESULT.json\n\n{__doc__}", file=sys.stderr)
        return 2
    path = Path(sys.argv[1])
    return finish(json.loads(path.read_text()), path.parent)


if __name__ == "__main__":
    sys.exit(main())
