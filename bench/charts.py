"""Draws the charts. Called by ``report.py`` with the raw result and the figures it derived from it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

LABELS = {
    "checkpoint-restart": "checkpoint-restart\n(torchrun)",
    "torchft-under-craft": "torchft\nunder CRAFT",
    "craft-lightning": "CRAFT\nwith Lightning",
    "craft": "CRAFT",
    "ddp": "DDP again",
    "torchft": "torchft\n(README settings)",
    "torchft-tuned": "torchft tuned\n(500 ms limits)",
}
COLORS = {"craft": "#1f6f8b", "ddp": "#888888", "torchft": "#b0563a", "torchft-tuned": "#d9a05b"}
FAULT_COLORS = {"SIGKILL": "#1f6f8b", "hang": "#d9a05b"}
BAR_COLOR = "#555555"


def _clean(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)


def draw_recovery(result: dict[str, Any], figures: dict[str, Any], path: Path) -> None:
    """Bars of the median recovery on a log scale, with every kill as a dot, and CRAFT's undisturbed step as a line."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    scatter = random.Random(0)
    for place, (system, found) in enumerate(figures.items()):
        times = [kill["recovery_s"] * 1e3 for kill in result["kills"][system]]
        median = found["recovery_s"]["median"] * 1e3
        axes.bar(place, median, width=0.55, color=COLORS[system], alpha=0.85)
        axes.scatter(
            [place + scatter.uniform(-0.2, 0.2) for _ in times], times, s=9, color="black", alpha=0.55, zorder=3
        )
        axes.annotate(
            f"{median:,.0f} ms", (place, max(times)), (0, 6), textcoords="offset points", ha="center", weight="bold"
        )
    if "craft" in figures:
        step_ms = figures["craft"]["step_s"] * 1e3
        label = f"one undisturbed CRAFT step, {step_ms:.0f} ms"
        axes.axhline(step_ms, color=BAR_COLOR, linestyle="--", linewidth=1, label=label)
        axes.legend(loc="upper left", frameon=False)
    axes.set_yscale("log")
    axes.set_ylim(10, 20_000)
    axes.set_xticks(range(len(figures)), [LABELS[system] for system in figures])
    axes.set_ylabel("ms, log scale")
    settings = result["settings"]
    axes.set_title(
        f"SIGKILL to the survivors' next commit ({settings['workers']} workers; dots: single kills)", loc="left"
    )
    _clean(axes)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_poster(result: dict[str, Any], figures: dict[str, Any], path: Path) -> None:
    """Two bars for each system, one per fault, on a log scale, with every trial as a dot."""
    figure, axes = plt.subplots(figsize=(10, 5), layout="constrained")
    scatter = random.Random(0)
    for place, faults in enumerate(figures.values()):
        for shift, (fault, found) in zip((-0.2, 0.2), faults.items(), strict=False):
            times, median = [1e3 * each for each in found["recovery_s"]], 1e3 * found["median_s"]
            label = f"{fault} of one worker" if place == 0 and fault == "SIGKILL" else "a hang (SIGSTOP)"
            axes.bar(place + shift, median, width=0.36, color=FAULT_COLORS[fault], label=label if place == 0 else None)
            spots = [place + shift + scatter.uniform(-0.12, 0.12) for _ in times]
            axes.scatter(spots, times, s=7, color="black", alpha=0.5, zorder=3)
            text = f"{median / 1e3:.1f} s" if median >= 1000 else f"{median:.0f} ms"
            above = (place + shift, max(times))
            axes.annotate(text, above, (0, 5), textcoords="offset points", ha="center", weight="bold", fontsize=9)
    axes.set_yscale("log")
    axes.set_ylim(10, 100_000)
    axes.set_xticks(range(len(figures)), [LABELS[system] for system in figures])
    axes.set_ylabel("ms until the next step past what was reached, log scale")
    limits, workers = result["limits"], result["settings"]["workers"]
    axes.set_title(
        f"A fault of one of {workers} workers: how long the training stands still (bars: medians; dots: single faults)"
        f"\ncheckpoint-restart: a save every {limits['save_every']} steps, and {limits['group_timeout_s']} s until it"
        " takes a hang for one (and torchrun 30 s more)",
        loc="left", fontsize=10,
    )  # fmt: skip
    axes.legend(loc="upper right", frameon=False)
    _clean(axes)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_overhead(result: dict[str, Any], figures: dict[str, Any], path: Path) -> None:
    """The ratio to DDP with its 95% interval, one row per job."""
    figure, axes = plt.subplots(figsize=(7, 1.6 + 0.6 * len(figures)), layout="constrained")
    seen: set[str] = set()
    for row, systems in enumerate(figures.values()):
        for system, found in systems.items():
            ratio = found["ratio"]
            error = [[ratio["value"] - ratio["low"]], [ratio["high"] - ratio["value"]]]
            label = None if system in seen else LABELS[system].split("\n")[0]
            seen.add(system)
            axes.errorbar(ratio["value"], row, xerr=error, fmt="o", color=COLORS[system], capsize=3, label=label)
            text: dict[str, Any] = {"ha": "center", "fontsize": 9, "color": COLORS[system]}
            axes.annotate(f"{ratio['value']:.3f}", (ratio["value"], row), (0, 7), "data", "offset points", **text)
    axes.axvline(1.0, color=BAR_COLOR, linewidth=1, zorder=0, label="DDP")
    axes.axvline(1.04, color=BAR_COLOR, linewidth=1, linestyle="--", zorder=0, label="bar, 1.04")
    axes.set_yticks(range(len(figures)), list(figures))
    axes.set_ylim(len(figures) - 0.5, -0.6)
    axes.margins(x=0.08)
    axes.set_xlabel("step time over DistributedDataParallel's (95% interval)")
    figure.suptitle("Failure-free step, alternating blocks in the same processes")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, ncols=4)
    _clean(axes)
    figure.savefig(path, dpi=150)
    plt.close(figure)
