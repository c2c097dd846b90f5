"""Medians and ratios with bootstrap confidence limits. Pure: the same figures in, the same limits out."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

RESAMPLES = 4000
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95% confidence limits."""

    value: float
    low: float
    high: float


def _limits(draws: list[float], value: float) -> Estimate:
    draws.sort()
    tail = int(len(draws) * (1 - LEVEL) / 2)
    return Estimate(value, draws[tail], draws[-tail - 1])


def paired_ratio(
    pairs: Sequence[tuple[float, float]], statistic: Callable[[Sequence[tuple[float, float]]], float]
) -> Estimate:
    """Return ``statistic`` of (numerator, denominator) pairs.

    The bootstrap draws whole pairs, so that what the two of a pair share cancels.
    """
    rng = random.Random(0)
    draws = [statistic(rng.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES)]
    return _limits(draws, statistic(pairs))


def trimmed_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the mean of the pairs' ratios without the lowest and the highest tenth.

    A few blocks that something else on the machine disturbed then do not decide, and unlike with a median the limits
    stay nearly as narrow as a mean's.
    """
    ratios = sorted(a / b for a, b in pairs)
    cut = len(ratios) // 10
    return statistics.fmean(ratios[cut : len(ratios) - cut])


def ratio_of_means(pairs: Sequence[tuple[float, float]]) -> float:
    """What the whole run cost, rare slow blocks included."""
    return sum(a for a, _ in pairs) / sum(b for _, b in pairs)


def ratio_of_medians(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Return median over median of two unpaired samples."""
    rng = random.Random(0)
    draws = [
        statistics.median(rng.choices(numerators, k=len(numerators)))
        / statistics.median(rng.choices(denominators, k=len(denominators)))
        for _ in range(RESAMPLES)
    ]
    return _limits(draws, statistics.median(numerators) / statistics.median(denominators))
