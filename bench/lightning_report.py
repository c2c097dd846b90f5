"""The figures of ``bench/lightning_overhead.py`` against their bar."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from bench.stats import paired_ratio, ratio_of_means, trimmed_ratio
from bench.verdict import Check, Summary

MAX_OVERHEAD = 1.03


def summarize_lightning(result: dict[str, Any]) -> Summary:
    pairs = [(block["system_s"], block["ddp_s"]) for block in result["blocks"]]
    ratio, means = paired_ratio(pairs, trimmed_ratio), paired_ratio(pairs, ratio_of_means)
    step_s = statistics.median(ddp_s for _, ddp_s in pairs) / result["settings"]["steps_per_block"]
    check = Check(
        'step under strategy="craft" over that of Lightning\'s own "ddp"',
        f"upper 95% limit {ratio.high:.3f}, estimate {ratio.value:.3f}",
        f"at most {MAX_OVERHEAD}",
        ratio.high <= MAX_OVERHEAD,
    )
    shown = [f"{each.value:.3f} ({each.low:.3f}-{each.high:.3f})" for each in (ratio, means)]
    return Summary(
        title="Failure-free step of Lightning's trainer, alternating blocks in the same processes",
        header=("workers", "block pairs", "ddp step (ms)", "ratio (95%)", "ratio of means (95%)"),
        rows=((str(result["settings"]["workers"]), str(len(pairs)), f"{step_s * 1e3:.1f}", *shown),),
        checks=(check,),
        figures={"ratio": asdict(ratio), "ratio_of_means": asdict(means), "ddp_step_s": step_s},
    )
