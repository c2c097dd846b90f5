"""Whether, and when, an agent starts a worker in the place of a lost one."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

AT_ONCE_S = 0.04
"""The survivors first: what starts now takes processor time from those who are just redoing a step."""
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 60.0
MOST_YOUNG = 8
"""So many workers that die in a row before they have had a part in anything show that the next one will, too."""


class Restarts(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent remembers of those it started."""

    count: int = 0
    """Workers started in the place of others."""
    young: int = 0
    """Workers that died in a row without having had a part in a step."""
    exhausted: str | None = None
    """Why no more are started, if none are."""


def worker_ended(
    restarts: Restarts, *, worked: bool, max_restarts: int, waited: bool = False
) -> tuple[Restarts, float | None]:
    """A worker was lost; ``worked``: whether it had had a part in any step. Returns the delay of the next, None: there is none.

    ``waited``: it was killed while it waited for others to begin with, which says nothing about the next one.

    One that had done its work is replaced at once. One that dies young is tried again ever later, and not for ever.
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
