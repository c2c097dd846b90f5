"""Choose the heartbeat interval: the more agents, the longer, so that one lighthouse can serve them all."""

from __future__ import annotations

from craft.protocol.heartbeats import Pace

LEVELS = (
    (0, Pace()),
    (20, Pace(heartbeat_s=0.1, progress_s=0.5)),
    (200, Pace(heartbeat_s=0.25, progress_s=1.0)),
)
"""(number of agents, interval from there on)."""
STAY_SHARE = 0.8
"""An interval holds until the agents are fewer by this share: one agent that comes and goes must not change it."""


def pace_for(agents: int, current: Pace) -> Pace:
    """Return the interval for so many agents; ``current`` is the present one."""
    chosen = LEVELS[0][1]
    for least, pace in LEVELS:
        held = current.heartbeat_s >= pace.heartbeat_s and current.progress_s >= pace.progress_s
        if agents > (STAY_SHARE * least if held else least):
            chosen = pace
    return chosen


def limit_for(limit_s: float, pace: Pace) -> float:
    """Return the limit on silence for an interval; ``limit_s`` is the one for the default interval."""
    return limit_s * pace.heartbeat_s / Pace().heartbeat_s
