"""How often agents are to speak: the more there are, the less often, so that one lighthouse can listen to them all."""

from __future__ import annotations

from craft.protocol.heartbeats import Pace

LEVELS = (
    (0, Pace()),
    (20, Pace(heartbeat_s=0.1, progress_s=0.5)),
    (200, Pace(heartbeat_s=0.25, progress_s=1.0)),
)
"""From above how many agents on, which pace."""
STAY_SHARE = 0.8
"""A pace holds until so much fewer agents are left: not everybody is told anew when one of them comes and goes."""


def pace_for(agents: int, current: Pace) -> Pace:
    """Return the pace for so many agents, where ``current`` is what they keep now."""
    chosen = LEVELS[0][1]
    for least, pace in LEVELS:
        held = current.heartbeat_s >= pace.heartbeat_s and current.progress_s >= pace.progress_s
        if agents > (STAY_SHARE * least if held else least):
            chosen = pace
    return chosen


def limit_for(limit_s: float, pace: Pace) -> float:
    """Return the limit on silence that goes with a pace, where ``limit_s`` goes with the default one."""
    return limit_s * pace.heartbeat_s / Pace().heartbeat_s
