"""Amounts in words: bytes, counts, microbatches, times of day, and what a fault cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from craft.protocol.events import Recovered

Line = dict[str, Any]
"""One line of the journal."""


def size(count: int) -> str:
    """Return a number of bytes, such as ``1.3 GB``."""
    value = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def count(number: int, what: str) -> str:
    """Return ``1 step`` or ``2 steps``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def counted(microbatches: int, samples: int | None) -> str:
    """Return ``2 microbatches (8 samples)``."""
    if not microbatches:
        return "no microbatch"
    plural = "" if microbatches == 1 else "es"
    inside = "" if samples is None else f" ({count(samples, 'sample')})"
    return f"{microbatches} microbatch{plural}{inside}"


def numbered(numbers: Sequence[int]) -> str:
    """Return ``microbatches 4, 5``."""
    return f"microbatch{'' if len(numbers) == 1 else 'es'} {', '.join(map(str, numbers))}"


def clock(seconds: float) -> str:
    """Return a local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def precise_clock(seconds: float) -> str:
    """Return a local time of day with milliseconds."""
    return f"{clock(seconds)}.{int(seconds % 1 * 1000):03d}"


def checkpoint(line: Line) -> str:
    """Return a complete checkpoint as ``step 120 (1.3 GB, 0.2 GB of it new, 3.1 s), tagged best``."""
    new, total = line["new_bytes"], line["total_bytes"]
    part = "all of it new" if new >= total else f"{size(new)} of it new"
    tag = f", tagged {line['tag']}" if line.get("tag") else ""
    return f"step {line['step']} ({size(total)}, {part}, {line['seconds']:.1f} s){tag}"


def cost_words(cost: Line, retried: Sequence[int] = ()) -> str:
    """Return ``43 ms, step 11 taken up again, 2 microbatches (8 samples) computed again``."""
    lost = "an unknown time (no step was committed before)"
    if cost["lost_ms"] is not None:
        lost = f"{cost['lost_ms']:.0f} ms"
    if cost.get("steps_lost"):
        redone = counted(cost["microbatches_redone"], None)
        return f"{lost}, {count(cost['steps_lost'], 'committed step')} computed again ({redone})"
    step = f"step {', '.join(map(str, retried))}" if retried else "a step"
    again = f"{step} taken up again" if cost["steps_retried"] else "no step taken up again"
    redone = counted(cost["microbatches_redone"], cost["samples_redone"])
    parts = [lost, again, f"{redone} computed again"]
    if cost["microbatches_dropped"]:
        parts.append(f"{counted(cost['microbatches_dropped'], cost['samples_dropped'])} dropped")
    return ", ".join(parts)


def work(recovered: Recovered | None) -> str:
    """Return what was computed again or dropped after a loss, as the end of a line; empty if nothing was."""
    if recovered is None:
        return ""
    redone = f", {counted(len(recovered.redone), recovered.redone_samples)} computed again" if recovered.redone else ""
    if not recovered.dropped:
        return redone
    return f"{redone}, {counted(len(recovered.dropped), recovered.dropped_samples)} dropped"
