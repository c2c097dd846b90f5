"""Choose how often checkpoints are taken."""

from __future__ import annotations

import math
import re

import msgspec

from craft.protocol.errors import ConfigError

_COUNTED = {"step": "steps", "steps": "steps", "epoch": "epochs", "epochs": "epochs"}
_UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
_EVERY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*")
_SECONDS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0}
_SECONDS |= {"d": 86400.0, "day": 86400.0, "week": 7 * 86400.0, "year": 365 * 86400.0}
_DURATION = re.compile(r"\s*(\d[\d,]*(?:\.\d+)?(?:e\d+)?)\s*([a-z]+)\s*")

PRIOR_MTBF_S = 3 * 3600.0
"""The assumed time between failures until the job has measured its own."""
MIN_INTERVAL_S = 1.0
MAX_INTERVAL_S = 3600.0


class Every(msgspec.Struct, frozen=True):
    """A number of steps, epochs or seconds; with none of these, CRAFT chooses."""

    steps: int | None = None
    seconds: float | None = None
    epochs: int | None = None


def parse_every(text: str) -> Every:
    """Parse ``auto``, ``500 steps``, ``2 epochs`` or ``10 min``; raise ConfigError otherwise."""
    if text.strip() == "auto":
        return Every()
    found = _EVERY.fullmatch(text)
    unit = found.group(2) if found else ""
    if found is None or (unit not in _UNITS and unit not in _COUNTED):
        raise ConfigError(f"every={text!r}: say 'auto', or such as '500 steps', '1 epoch', '30 s', '10 min' or '1 h'")
    number = float(found.group(1))
    if number <= 0 or (unit in _COUNTED and number != int(number)):
        raise ConfigError(f"every={text!r}: give a number above 0, a whole one for steps and epochs")
    if unit in _UNITS:
        return Every(seconds=number * _UNITS[unit])
    return Every(steps=int(number)) if _COUNTED[unit] == "steps" else Every(epochs=int(number))


def parse_duration(text: str) -> float:
    """Parse ``12 s``, ``6min`` or ``50,000 hours`` into seconds; raise ConfigError otherwise."""
    found = _DURATION.fullmatch(text.lower())
    unit = found.group(2) if found else ""
    unit_s = _SECONDS.get(unit) or _SECONDS.get(unit.removesuffix("s"))
    seconds = float(found.group(1).replace(",", "")) * unit_s if found and unit_s else math.inf
    if not math.isfinite(seconds):
        raise ConfigError(
            f"{text!r} is not a duration: give a number and a unit, such as '12 s', '6 min', '1.5 h' or '30 days'"
        )
    return seconds


def first_order(cost_s: float, between_s: float) -> float:
    """Return the interval that loses least, sqrt(2 C F), for checkpoint cost C and time between failures F >> C."""
    return math.sqrt(2 * cost_s * between_s)


class IntervalChoice(msgspec.Struct, frozen=True):
    interval_s: float
    reason: str


def choose(cost_s: float, write_s: float, elapsed_s: float, failures: int) -> IntervalChoice:
    """Return the interval that loses least (``first_order``), within limits.

    ``write_s``: how long one takes to be complete; the interval is not shorter. F starts from a prior.
    """
    between_s = (PRIOR_MTBF_S + elapsed_s) / (1 + failures)
    best = first_order(cost_s, between_s)
    interval = min(max(best, 2 * write_s, MIN_INTERVAL_S), MAX_INTERVAL_S)
    seen = f"{failures} failure{'s' * (failures != 1)} in {elapsed_s:.0f} s"
    reason = f"a checkpoint costs {cost_s * 1000:.1f} ms, failures are taken to be {between_s:.0f} s apart ({seen})"
    if interval > best:
        reason += f"; no oftener, since writing one takes {write_s:.1f} s"
    elif interval < best:
        reason += "; at least once an hour"
    return IntervalChoice(interval, reason)
