"""At which moments workers of sharded jobs are killed, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

POINTS = (
    "batch", "forward", "backward", "beat", "blocks_sent", "before_acknowledge", "acknowledging", "committed",
    "before_clip", "after_clip", "after_update",
)  # fmt: skip
POINT_OF_CHECKPOINTS = "saved"
POINTS_OF_JOINERS = ("join", "fetched", "loaded")
_STEP_S = 0.12
"""About how long a step takes."""


@dataclass(frozen=True)
class Kill:
    """One loss, or two of which the second comes while the first is being replaced."""

    moment: str
    """``delay``, ``joiner`` (its replacement, too), ``meanwhile`` (another one, too), or a point of a step."""
    delay_s: float = 0.0
    pick: float = 0.0
    """Which of the workers, from 0 to 1."""
    after_s: float = 0.0
    """How long after the first loss the second one comes."""

    @property
    def is_at_a_point(self) -> bool:
        return self.moment in (*POINTS, POINT_OF_CHECKPOINTS)

    def __str__(self) -> str:
        return self.moment


def draw_kills(seed: int, number: int, *, checkpoints: bool = False) -> list[Kill]:
    """Return what is done to one job; ``checkpoints``: it writes some."""
    draw = random.Random(f"{seed} sharded kills")
    points = (*POINTS, *[POINT_OF_CHECKPOINTS] * 4) if checkpoints else POINTS
    moments = [draw.choice(["delay", "point", "point", "joiner", "meanwhile"]) for _ in range(number)]
    return [
        Kill(
            moment=draw.choice(points) if moment == "point" else moment,
            delay_s=draw.uniform(0.0, 2 * _STEP_S),
            pick=draw.random(),
            after_s=draw.uniform(0.0, 2.0),
        )
        for moment in moments
    ]
