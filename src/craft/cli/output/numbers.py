"""Numbers on the command line."""

from __future__ import annotations

import math
from typing import Any

import click


class FiniteNumber(click.FloatRange):
    """A number with bounds that refuses ``nan`` and ``inf``, which click accepts."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return found
