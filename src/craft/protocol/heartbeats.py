"""Small messages for large jobs: empty heartbeats, the report interval, directive updates.

Each stands for a full message of ``messages``, on one connection and in its order; a new connection begins with full ones.
So they are as level-triggered as those.
"""

from __future__ import annotations

import msgspec

from craft.protocol.membership import Member
from craft.protocol.messages import Directive


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The host lives, and its last report on this connection still holds. Agent to lighthouse."""

    sequence: int
    """The sequence of that report."""


class Pace(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How often agents report. Lighthouse to agents; each connection begins with the default."""

    heartbeat_s: float = 0.1
    """The most time between two messages of an agent."""
    progress_s: float = 0.0
    """0: agents report every change at once, and every heartbeat is a report. Else mere progress waits for up to this
    long, a report is repeated this often, and heartbeats in between are empty."""


class GenerationChange(msgspec.Struct, frozen=True, kw_only=True):
    """A generation, as a difference from one that the receiver has."""

    base: str
    """Name of the generation that the receiver has."""
    number: int
    nonce: str
    without: tuple[str, ...] = ()
    """Members of the base that are not in this one, or have changed."""
    placed: tuple[tuple[int, Member], ...] = ()
    """(rank, member) to insert after that, in the order of ranks."""


class Update(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A directive, as a difference from the one before it on this connection. Lighthouse to agents."""

    directive: Directive
    """The directive without the generations below."""
    generation: GenerationChange | None = None
    upcoming: GenerationChange | None = None
