"""Format a plan as lines of text, and as records for ``--json``. Pure: ``cli/plan.py`` prints them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from craft.plan.techniques import Cluster, Row, advise, best_spares

HEAD = ("technique", "goodput", "checkpoint every", "lost", "saved", "samples")
RIGHT = (1, 3, 4)
"""Columns of numbers."""
_BAR_WIDTH = 40
_ANSWERS = {"redo": "--on-loss redo", "wait": "--on-loss wait"}


def cells(cluster: Cluster, rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return a row of cells for each technique; money is per ``weeks``."""
    return [
        (
            row.name,
            f"{100 * row.goodput:.2f}%",
            "-" if row.interval_s is None else f"{lasts(row.interval_s)} ({_steps(cluster, row.interval_s)})",
            money(row.lost),
            money(row.saves) if index else "-",
            "all" if row.exact else f"{_percent(row.left_out)} left out",
        )
        for index, row in enumerate(rows)
    ]


def bars(rows: Sequence[Row], block: str) -> Iterator[str]:
    """Yield a bar of ``block`` for what each technique loses; the longest is the one that loses most."""
    most = max(row.lost for row in rows) or 1.0
    width = max(len(row.name) for row in rows)
    for row in rows:
        length = max(0, round(_BAR_WIDTH * row.lost / most))
        # Any loss is visible.
        bar = block * max(length, 1 if row.lost > 0 else 0)
        yield f"{row.name.ljust(width)}  {bar} {money(row.lost)}"


def advice(cluster: Cluster, rows: tuple[Row, ...]) -> Iterator[str]:
    """Yield the advice in sentences, then the command that follows it."""
    best, first = advise(rows), rows[0]
    instead = f"{money(best.lost)} instead of {money(first.lost)} ({first.name})"
    yield f"{best.name} loses least of those that use every sample: {instead}."
    if best.interval_s is not None:
        spared = best.name.startswith(tuple(_ANSWERS))
        purpose = " They are for the loss of everything only." if spared and cluster.num_units > 1 else ""
        yield f"A checkpoint every {lasts(best.interval_s)} ({_steps(cluster, best.interval_s)}) loses least.{purpose}"
    yield _spares(cluster)
    yield f"  {_command(best, cluster)}"


def _spares(cluster: Cluster) -> str:
    number = best_spares(cluster)
    each = f"{cluster.lost} GPU{'s' * (cluster.lost != 1)} each"
    if not number:
        return f"Spares ({each}) would cost more than they save."
    return f"{number} spare{'s' * (number != 1)} ({each}) would lose the least money."


def _command(best: Row, cluster: Cluster) -> str:
    words = ["craft run"]
    words += [flag for name, flag in _ANSWERS.items() if best.name.startswith(name)]
    if best.name.endswith("-spares"):
        words.append(f"--spares {cluster.spares * cluster.lost}")
    words.append("--checkpoints URL")
    if best.interval_s is not None:
        words.append(f"--checkpoint-every '{lasts(max(1.0, best.interval_s))}'")
    return " ".join([*words, "--resume train.py"])


def inputs(cluster: Cluster, origins: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield the inputs of the plan: name, value and origin."""
    rate = cluster.failure_rate * 86400
    together = f"{cluster.lost} of which fail together" if cluster.lost > 1 else "which fail one by one"
    yield "GPUs", f"{cluster.gpus:,}, {together}", origins["gpus"]
    yield "failures", f"{rate:,.0f} a day" if rate >= 100 else f"{rate:.3g} a day", origins["failures_per_day"]
    yield "loss of everything", f"{cluster.outages_per_month:.3g} a month", origins["outages_per_month"]
    microbatches = f"{cluster.num_microbatches:,} microbatches"
    yield "step", f"{lasts(cluster.step_s)}, {microbatches}", origins["step_s"]
    slower = f"{cluster.slower(1):.3f} times as long" if cluster.num_units > 1 else "there is none"
    yield "step after a loss", slower, "derived"
    yield "checkpoint, all wait", lasts(cluster.checkpoint_s), origins["checkpoint_s"]
    yield "checkpoint of CRAFT", lasts(cluster.stall), origins["stall_s"]
    yield "restart", lasts(cluster.restart_s), origins["restart_s"]
    yield "replacement", lasts(cluster.replaced_after_s), origins["replace_s"]
    if cluster.pause_s is None:
        yield "loss is seen after", lasts(cluster.detect_s), origins["detect_s"]
    else:
        yield "a loss costs at once", lasts(cluster.pause_s), origins["pause_s"]
    yield "price", f"{cluster.price:.4g} for a GPU and hour", origins["price"]


def record(cluster: Cluster, rows: tuple[Row, ...], origins: Mapping[str, str]) -> dict[str, Any]:
    """Return everything, for ``--json``. Money is in the unit of the price, over ``weeks``."""
    best = advise(rows)
    return {
        "inputs": msgspec.to_builtins(cluster),
        "origins": dict(origins),
        "failures_per_day": cluster.failure_rate * 86400,
        "techniques": [msgspec.to_builtins(row) for row in rows],
        "advice": {
            "technique": best.name,
            "interval_s": best.interval_s,
            "spares": best_spares(cluster),
            "command": _command(best, cluster),
        },
    }


def money(amount: float) -> str:
    """Format an amount in the unit of the price."""
    return f"{amount:,.0f}" if abs(amount) >= 100 else f"{amount:,.2f}"


def lasts(seconds: float) -> str:
    """Format a time such as ``350 ms``, ``45 s``, ``12 min`` or ``3.2 h``; ``--checkpoint-every`` reads it from 1 s up."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _steps(cluster: Cluster, seconds: float) -> str:
    number = max(1, math.floor(seconds / cluster.step_s))
    return f"{number:,} step{'s' * (number != 1)}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%" if share >= 1e-5 else "<0.001%"
