"""Draws the chart of ``bench/completion.py``, for the first page: as SVG, which follows the reader's colour scheme."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from bench.completion_report import NAMES

STYLE = """
svg { font-family: system-ui, sans-serif; font-size: 13px }
.back { fill: #ffffff } text { fill: #1b2530 } .dim { fill: #525e6b } .bold { font-weight: 600 }
.hot { fill: #fde3d0; stroke: #b4541a } .good { fill: #dcf0e0; stroke: #2e7d43 } .soft { fill: #eef0f3; stroke: #7d8794 }
@media (prefers-color-scheme: dark) {
.back { fill: #171c24 } text { fill: #e8edf4 } .dim { fill: #aab4c1 }
.hot { fill: #4a2c19; stroke: #f0a068 } .good { fill: #1d3d28; stroke: #7bcf92 } .soft { fill: #2a303a; stroke: #8a94a3 }
}
"""
"""As that of the figures in docs/assets."""
WIDTH, LEFT, BAR, TOP = 760, 170, 22, 66


def draw_completion(result: dict[str, Any], figures: dict[str, Any], path: Path) -> None:
    """Two bars for each system: the time of the undisturbed run, and with kills; beside them what became of the samples."""
    longest = max((each["disturbed_s"] for each in figures.values()), default=1.0)
    scale = (WIDTH - LEFT - 250) / longest
    every = result["settings"]["every"]
    parts = [
        _text(20, 28, "Time to train the same number of samples, with a SIGKILL "
              f"of one process every {every:.0f} s", "bold"),
        _text(20, 48, "FSDP2 over 2 replicas of 2 processes, on two cores. Light: undisturbed.", "dim"),
    ]  # fmt: skip
    y = TOP
    for system, each in figures.items():
        kind = "good" if system == "craft" else "hot"
        parts.append(_text(20, y + BAR + 5, NAMES[system], "bold"))
        for shift, key, style in ((0, "undisturbed_s", "soft"), (BAR, "disturbed_s", kind)):
            width = each[key] * scale
            parts.append(f'<rect class="{style}" x="{LEFT}" y="{y + shift}" width="{width:.1f}" height="{BAR - 2}"/>')
            parts.append(_text(LEFT + width + 6, y + shift + 15, _words(key, each), ""))
        y += 2 * BAR + 20
    path.write_text(_svg(WIDTH, y + 4, "Time to train under failures", parts))


def _words(key: str, figures: dict[str, Any]) -> str:
    seconds = f"{figures[key]:.0f} s"
    if key == "undisturbed_s":
        return seconds
    fates = [f"{figures[fate]:,} samples {fate}" for fate in ("lost", "repeated") if figures[fate]]
    return f"{seconds} ({100 * (figures['slowdown'] - 1):+.0f}%), " + (
        " and ".join(fates) or "no sample lost or repeated"
    )


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(words)}</text>'


def _svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    back = f'<rect class="back" width="{width}" height="{height}" rx="10"/>'
    return (
        "\n".join([head, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", back, *parts, "</svg>"]) + "\n"
    )
