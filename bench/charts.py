"""Draws the two charts. Called by ``report.py`` with the raw result and the figures it derived from it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

LABELS = {
    "craft": "CRAFT",
    "ddp": "DDP again",
    "torchft": "torchft\n(README settings)",
    "torchft-tuned": "torchft tuned\n(500 ms limits)",
}
COLORS = {"craft": "#1f6f8b", "ddp": "#888888", "torchft": "#b0563a", "torchft-tuned": "#d9a05b"}
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
