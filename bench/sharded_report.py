"""The figures of ``bench/sharded.py`` against their bars."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.stats import Estimate, paired_ratio, ratio_of_means, ratio_of_medians, trimmed_ratio
from bench.verdict import Check, Summary

MAX_BEYOND_STEP_MS = 100.0
MAX_FULL_BEYOND_START_S = 1.5
MIN_RATIO_TO_TORCHFT = 10.0
MIN_KILLS = 20
MAX_OVERHEAD = 1.05
MAX_SHARDS = 1.0


def summarize_sharded_recovery(result: dict[str, Any]) -> Summary:
    kills: dict[str, list[dict[str, float]]] = {system: found for system, found in result["kills"].items() if found}
    figures: dict[str, Any] = {}
    rows = []
    for system, found in kills.items():
        columns = {name: [kill[name] for kill in found] for name in ("recovery_s", "full_s", "step_s")}
        medians = {name: statistics.median(each) for name, each in columns.items()}
        figures[system] = {"kills": len(found), **{name: _spread(each) for name, each in columns.items()}}
        rows.append(
            (
                system,
                str(len(found)),
                _ms(medians["step_s"]),
                _ms(medians["recovery_s"]),
                _range(columns["recovery_s"]),
                _ms(medians["full_s"]),
                _range(columns["full_s"]),
            )
        )
    checks = _craft_checks(kills["craft"], result["exact"], figures) if "craft" in kills else []
    return Summary(
        title="SIGKILL of one worker of 2 replicas of 2 (FSDP2): to the next commit of all workers of the other replica, and to\n"
        "the first step that both replicas compute (ms). torchft: the whole group is started again at once; tuned: "
        f"{result['tuned_ms']} ms\nfor heartbeats and collectives.",
        header=("system", "kills", "step", "next commit, median", "min-max", "full strength, median", "min-max"),
        rows=tuple(rows),
        checks=tuple(checks + _ratio_checks(kills, figures)),
        figures=figures,
    )


def _craft_checks(kills: Sequence[dict[str, float]], exact: Sequence[bool], figures: dict[str, Any]) -> list[Check]:
    beyond_ms = 1e3 * statistics.median(kill["recovery_s"] - kill["step_s"] for kill in kills)
    beyond_start_s = statistics.median(kill["full_s"] - kill["script_s"] for kill in kills)
    start_s = statistics.median(kill["script_s"] for kill in kills)
    figures["craft"] |= {"beyond_step_ms": beyond_ms, "full_beyond_start_s": beyond_start_s, "script_s": start_s}
    return [
        Check(
            "median of SIGKILL to the other replica's next commit, beyond one step",
            f"{beyond_ms:.0f} ms",
            f"at most {MAX_BEYOND_STEP_MS:.0f} ms",
            beyond_ms <= MAX_BEYOND_STEP_MS,
        ),
        Check(
            f"median of SIGKILL to full strength, beyond the script's start of {start_s:.2f} s",
            f"{beyond_start_s:.2f} s",
            f"at most {MAX_FULL_BEYOND_START_S} s",
            beyond_start_s <= MAX_FULL_BEYOND_START_S,
        ),
        Check("kills of CRAFT's workers", str(len(kills)), f"at least {MIN_KILLS}", len(kills) >= MIN_KILLS),
        Check(
            "jobs of CRAFT with the undisturbed bits",
            f"{sum(exact)} of {len(exact)}",
            "all",
            bool(exact) and all(exact),
        ),
    ]


def _ratio_checks(kills: dict[str, list[dict[str, float]]], figures: dict[str, Any]) -> list[Check]:
    checks = []
    for system in set(kills) & {"torchft", "torchft-tuned"} if "craft" in kills else set():
        times = {name: [kill["recovery_s"] for kill in kills[name]] for name in (system, "craft")}
        ratio = ratio_of_medians(times[system], times["craft"])
        figures[system]["ratio"] = asdict(ratio)
        # torchft tuned is only told: no bar was set for it.
        least = MIN_RATIO_TO_TORCHFT if system == "torchft" else 0.0
        checks.append(
            Check(
                f"next commit of {system} over CRAFT's, medians",
                f"{ratio.value:.1f} (95% {ratio.low:.1f}-{ratio.high:.1f})",
                f"at least {least:.0f}" if least else "none",
                ratio.value >= least,
            )
        )
    return sorted(checks, key=lambda each: each.what)


def summarize_sharded_overhead(result: dict[str, Any]) -> Summary:
    rows, checks = [], []
    figures: dict[str, Any] = {}
    if blocks := result["blocks"]:
        pairs = [(block["craft"], block["hsdp"]) for block in blocks]
        ratio, means = paired_ratio(pairs, trimmed_ratio), paired_ratio(pairs, ratio_of_means)
        cpu = paired_ratio([(block["craft_cpu"], block["hsdp_cpu"]) for block in blocks], ratio_of_means)
        step_s = statistics.median(hsdp_s for _, hsdp_s in pairs) / result["settings"]["steps_per_block"]
        figures["step"] = {"ratio": asdict(ratio), "ratio_of_means": asdict(means), "hsdp_step_s": step_s}
        figures["step"]["processor_time"] = asdict(cpu)
        rows.append((str(len(pairs)), _ms(step_s), _interval(ratio), _interval(means), _interval(cpu)))
        measured = f"upper 95% limit {ratio.high:.3f}, estimate {ratio.value:.3f}"
        checks.append(
            Check("CRAFT's step over HSDP's", measured, f"at most {MAX_OVERHEAD}", ratio.high <= MAX_OVERHEAD)
        )
    if result["memory"]:
        more = more_shards(result["memory"])
        figures["more_shards"] = more
        figures["memory"] = [
            {**each, "craft": max(each["craft"]), "hsdp": max(each["hsdp"])} for each in result["memory"]
        ]
        checks.append(
            Check(
                "memory of a worker beyond HSDP's (peak RSS, growth with the model), in gradient shards",
                f"{more:+.2f}",
                f"at most {MAX_SHARDS:.0f}",
                more <= MAX_SHARDS,
            )
        )
    return Summary(
        title="Failure-free step of CRAFT's 2 replicas of 2 workers against torch's HSDP (2-D mesh, FSDP2, Gloo), 4 processes\n"
        "each, in alternating blocks",
        header=("block pairs", "HSDP step (ms)", "ratio (95%)", "ratio of means (95%)", "processor time (95%)"),
        rows=tuple(rows),
        checks=tuple(checks),
        figures=figures,
    )


def more_shards(memory: Sequence[dict[str, Any]]) -> float:
    """Return how many gradient shards more a worker of CRAFT holds than one of HSDP.

    What does not grow with the model (imported code, threads) cancels between two widths. Of each job counts its largest worker,
    of several jobs the median.
    """
    widths = sorted({each["width"] for each in memory})
    small, large = ([each for each in memory if each["width"] == width] for width in (widths[0], widths[-1]))
    shards: int = large[0]["shard_bytes"] - small[0]["shard_bytes"]
    if shards <= 0:
        return float("nan")
    beyond = [statistics.median(max(each["craft"]) - max(each["hsdp"]) for each in rows) for rows in (large, small)]
    return float(beyond[0] - beyond[1]) / shards


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"


def _range(values: Sequence[float]) -> str:
    return f"{_ms(min(values))}-{_ms(max(values))}"


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _interval(ratio: Estimate) -> str:
    return f"{ratio.value:.3f} ({ratio.low:.3f}-{ratio.high:.3f})"
