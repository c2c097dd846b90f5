"""Draw a plan as a picture. Needs matplotlib, which CRAFT does not install."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from craft.plan.tables import money
from craft.plan.techniques import Cluster, Row, compare
from craft.protocol.errors import ConfigError

FORMS = (".png", ".svg", ".pdf")
_COLORS = {"redo": "#1f6f8b", "wait": "#6b9e6f", "restart": "#888888", "torchft": "#b0563a", "shrink": "#d9a05b"}
_FACTORS = [10 ** (power / 8) for power in range(-8, 13)]


def check_chart(path: Path) -> None:
    """Raise ConfigError early if the chart cannot be written: wrong suffix, no directory, no matplotlib."""
    if path.suffix.lower() not in FORMS:
        raise ConfigError(f"--chart {path}: the name ends with .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--chart {path}: there is no directory {path.absolute().parent}")
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(
            "--chart needs matplotlib: 'pip install matplotlib', or leave it out; the text has bars, too"
        ) from None
    matplotlib.use("Agg")


def draw(cluster: Cluster, rows: Sequence[Row], path: Path) -> None:
    """Draw what each technique loses (left), and the share of time that each loses over the failure rate (right)."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    _draw_bars(left, cluster, rows)
    _draw_curves(right, cluster)
    for axes in (left, right):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"--chart {path} cannot be written: {error.strerror or error}") from None
    finally:
        plt.close(figure)


def _draw_bars(axes: Any, cluster: Cluster, rows: Sequence[Row]) -> None:
    names = [row.name for row in rows]
    bars = axes.barh(names, [row.lost for row in rows], color=[_color(name) for name in names])
    axes.bar_label(bars, [f"{money(row.lost)}  ({100 * row.goodput:.2f}%)" for row in rows], padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.3)
    weeks = "week" if cluster.weeks == 1 else f"{cluster.weeks:g} weeks"
    axes.set_title(
        f"Money lost in a {weeks} (goodput)" if cluster.weeks == 1 else f"Money lost in {weeks} (goodput)", loc="left"
    )


def _draw_curves(axes: Any, cluster: Cluster) -> None:
    now = cluster.failure_rate * 86400 or 1.0
    rates = [now * factor for factor in _FACTORS]
    found = [compare(replace(cluster, failures_per_day=rate)) for rate in rates]
    for index, row in enumerate(found[0]):
        lost = [100 * (1 - rows[index].goodput) for rows in found]
        style = "--" if row.name.endswith(("-spares", "-best")) else ":" if row.name.endswith("-craft") else "-"
        axes.plot(rates, lost, style, color=_color(row.name), label=row.name)
    axes.axvline(now, color="#cccccc", zorder=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("failures a day")
    axes.set_title("Share of the time that is lost, %", loc="left")
    axes.legend(frameon=False, fontsize="small")


def _color(name: str) -> str:
    return _COLORS[name.partition("-")[0]]
