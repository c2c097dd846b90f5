"""When an agent starts a replacement for a lost worker, and when it stops doing so."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

AT_ONCE_S = 0.04
"""Delay of the first replacement: its start must not take processor time from survivors that redo a step."""
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 60.0
MOST_YOUNG = 8
"""An agent gives up after this many workers in a row died before their first step."""


class Restarts(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent remembers of the replacements that it started."""

    count: int = 0
    """Replacements started."""
    young: int = 0
    """Workers in a row that died before their first step."""
    exhausted: str | None = None
    """Why no more are started; None while they are."""


def worker_ended(
    restarts: Restarts, *, worked: bool, max_restarts: int, waited: bool = False
) -> tuple[Restarts, float | None]:
    """Count a lost worker; return the delay until its replacement starts, or None if none starts.

    ``worked``: whether it took part in a step. Then its replacement starts at once; else after a growing delay, a few times.
    ``waited``: it was killed while it waited for others before its first step, which says nothing about the next one.
    """
    young = 0 if worked else restarts.young + (not waited)
    restarts = replace(restarts, young=young)
    if restarts.exhausted is not None:
        return restarts, None
    if restarts.count >= max_restarts:
        reason = f"--max-restarts is {max_restarts}" + (", and as many were started" if max_restarts else "")
        return replace(restarts, exhausted=reason), None
    if young >= MOST_YOUNG:
        reason = f"{young} workers in a row died before they had a part in a step: the next one would, too"
        return replace(restarts, exhausted=reason), None
    delay_s = AT_ONCE_S if young <= 1 else min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (young - 2))
    return replace(restarts, count=restarts.count + 1), delay_s
